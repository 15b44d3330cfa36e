// SPDX-License-Identifier: Apache-2.0
// Scores of the site's search: Sphinx's own, in which many pages are equal; of those, guides to a symptom come first,
// then other guides, then pages of findings and the reference.
const SYMPTOM = /^how_to\/(hang|out_of_memory|gradient_accumulation|silent_errors)$/;
const GUIDE = /^(how_to|tutorials|migrate|install|faq)/;
var Scorer = {
  score: ([docname, , , , score]) => score + (SYMPTOM.test(docname) ? 8 : GUIDE.test(docname) ? 6 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
