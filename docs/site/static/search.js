/* Answers questions by sections: Sphinx's own search finds only pages that have every word of the query.

   Okapi BM25 over the sections of extras.py; words of titles count more. A hit leads to its section. */
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const ASKING = new Set(("after am an any before can cannot could did do does done else from get give has have how i if its " +
    "like me mine must my need of only one or our own should so some than them those too up us used want we were what " +
    "when where whether which while who why would you your").split(" "));
  const stemmer = new Stemmer();
  const stems = new Map();
  const stem = (word) => stems.get(word) ?? (stems.set(word, stemmer.stemWord(word)), stems.get(word));
  const wordsOf = (text) => splitQuery(text.toLowerCase()).filter((w) => !ASKING.has(w) && !stopwords.has(w)).map(stem);
  // What is made from the code, and lists for programs, come behind what explains.
  const weightOf = (page, title) =>
    page.endsWith("/own-script") ? 1.2 : page.includes("generated/") ? 0.4 : page.endsWith("/files") ? 0.6 : /^[a-z-]+: /.test(title) ? 0.7 : 1;

  let index = null;
  const build = () => {
    const titles = Search._index.titles;
    const pageTitle = new Map(Search._index.docnames.map((name, at) => [name, titles[at]]));
    const holders = new Map(); // word -> number of sections that have it
    const sections = SECTIONS.map(([page, title, anchor, text]) => {
      const counts = new Map();
      const add = (words, times) => words.forEach((w) => counts.set(w, (counts.get(w) ?? 0) + times));
      const body = wordsOf(text);
      add(body, 1);
      add(wordsOf(title), 4);
      if (title !== pageTitle.get(page)) add(wordsOf(pageTitle.get(page)), 1.5);
      for (const word of counts.keys()) holders.set(word, (holders.get(word) ?? 0) + 1);
      return { page, title, anchor, counts, titleWords: new Set(wordsOf(title)), length: body.length + 10 };
    });
    const mean = sections.reduce((sum, s) => sum + s.length, 0) / sections.length;
    return { sections, holders, mean, pageTitle };
  };

  Search._performSearch = (query) => {
    document.getElementById("search-progress")?.replaceChildren();
    index ??= build();
    const terms = [...new Set(wordsOf(query))];
    const rare = (term) => Math.log(1 + index.sections.length / (1 + (index.holders.get(term) ?? 0)));
    const best = new Map(); // page -> its best section
    for (const section of index.sections) {
      let score = 0;
      for (const term of terms) {
        const count = section.counts.get(term) ?? 0;
        if (count) score += (rare(term) * count * 2.2) / (count + 1.2 * (0.4 + (0.6 * section.length) / index.mean));
      }
      const asked = terms.filter((t) => section.titleWords.has(t));
      if (asked.length) score += asked.reduce((sum, t) => sum + rare(t), 0) * (asked.length / section.titleWords.size) ** 0.5;
      score *= weightOf(section.page, section.title);
      if (score > (best.get(section.page)?.score ?? 0)) best.set(section.page, { score, ...section });
    }
    return [...best.values()].sort((a, b) => a.score - b.score).slice(-20).map((hit) => {
      const page = index.pageTitle.get(hit.page);
      const title = hit.title === page ? page : `${page} > ${hit.title}`;
      const file = Search._index.filenames[Search._index.docnames.indexOf(hit.page)];
      return [hit.page, title, "#" + hit.anchor, null, hit.score, file, SearchResultKind.text]; // the last one is shown first
    });
  };
});
