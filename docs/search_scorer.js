// SPDX-License-Identifier: Apache-2.0
// Scores of the site's search: Sphinx's own, with guides before the many pages of findings and the reference.
const GUIDE = 12;
var Scorer = {
  score: ([docname, , , , score]) => score + (/^(how_to|tutorials|migrate|install|faq)/.test(docname) ? GUIDE : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
