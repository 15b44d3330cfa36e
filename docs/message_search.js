// SPDX-License-Identifier: Apache-2.0
// Sphinx's search wants every word of a query on a page, so that a pasted message, with its paths and numbers, finds
// nothing. The pages of a message come first here, as `ddpilot explain` finds them; docs/build_site.py adds MESSAGES.
const LABELS = /^(?:\[?rank ?\d+\]?: ?)?(?:\[?[\w.]*(?:error|exception|warning)\]?: )?/i;
const MIN_PART_CHARS = 10;
const oneLine = (text) => text.split(/\s+/).filter(Boolean).join(" ");
const trimDots = (text) => text.replace(/^[. ]+|[. ]+$/g, "");

const symptomPattern = (symptom, flags) => {
  const parts = trimDots(symptom).split("...");
  const escaped = parts.map((part) => oneLine(part).replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return new RegExp(escaped.join(".{0,300}?") + (/\d$/.test(symptom) ? "(?!\\d)" : ""), flags);
};

// The pages of MESSAGES, [page, isGeneral, symptoms], with a symptom in the message: the specific ones first, and of
// those the one with the longest symptom.
const pagesOfMessage = (message) => {
  const words = oneLine(message);
  for (const flags of ["", "i"]) {
    const found = MESSAGES.map(([page, isGeneral, symptoms]) => {
      const hits = symptoms.filter((symptom) => symptomPattern(symptom, flags).test(words));
      return { page, isGeneral, length: Math.max(0, ...hits.map((symptom) => symptom.length)) };
    }).filter(({ length }) => length);
    found.sort((a, b) => a.isGeneral - b.isGeneral || b.length - a.length);
    if (found.length) return found.map(({ page }) => page);
  }
  const part = words.toLowerCase().replace(LABELS, "").replace(/[. ]+$/, "");
  if (part.length < MIN_PART_CHARS) return [];
  const found = MESSAGES.map(([page, , symptoms]) => {
    const hits = symptoms.filter((symptom) => symptom.toLowerCase().includes(part));
    return { page, length: Math.min(...hits.map((symptom) => symptom.length)) };
  }).filter(({ length }) => length < Infinity);
  found.sort((a, b) => a.length - b.length);
  return found.slice(0, 1).map(({ page }) => page); // of a few words, which may be a question too
};

if (typeof Search !== "undefined") {
  const searchWords = Search._performSearch;
  Search._performSearch = (query, ...terms) => {
    const { docnames, titles, filenames } = Search._index;
    const pages = pagesOfMessage(query).slice(0, 3);
    const others = searchWords(query, ...terms).filter((result) => !pages.includes(result[0]));
    const first = pages.map((page) => {
      const file = docnames.indexOf(page);
      return [page, titles[file], "", null, 0, filenames[file], SearchResultKind.title];
    });
    return [...others, ...first.reverse()]; // the best one is the last
  };
}
