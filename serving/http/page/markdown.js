// Markdown to elements of the document. Text only ever becomes text: nothing of it is parsed as HTML, and links
// lead to http, https and mailto alone. Linear in the text.

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBERED = /^\s*\d{1,9}[.)]\s+(.*)$/;
const QUOTE = /^\s*>\s?(.*)$/;
const ROW = /^\s*\|(.*)\|\s*$/;
const RULE = /^\s*\|?[\s:|-]+\|?\s*$/;
const SAFE = /^(https?:|mailto:)/i;

export function rendered(text) {
  const out = document.createDocumentFragment();
  const lines = text.split("\n");
  let at = 0;
  while (at < lines.length) {
    at = block(lines, at, out);
  }
  return out;
}

function block(lines, at, out) {
  const line = lines[at];
  const fence = line.match(FENCE);
  if (fence) return code(lines, at + 1, fence[1], out);
  if (!line.trim()) return at + 1;
  const heading = line.match(HEADING);
  if (heading) {
    // Headings of the answer begin below those of the page.
    const level = Math.min(6, heading[1].length + 2);
    inline(heading[2], append(out, `h${level}`));
    return at + 1;
  }
  if (QUOTE.test(line)) {
    const [end, texts] = run(lines, at, QUOTE);
    const quote = append(out, "blockquote");
    inline(texts.join("\n"), append(quote, "p"));
    return end;
  }
  for (const [pattern, tag] of [[BULLET, "ul"], [NUMBERED, "ol"]]) {
    if (pattern.test(line)) {
      const [end, texts] = run(lines, at, pattern);
      const list = append(out, tag);
      for (const one of texts) inline(one, append(list, "li"));
      return end;
    }
  }
  if (ROW.test(line) && at + 1 < lines.length && RULE.test(lines[at + 1]) && lines[at + 1].includes("-")) {
    return table(lines, at, out);
  }
  const texts = [];
  while (at < lines.length && lines[at].trim() && !begins(lines[at])) texts.push(lines[at++]);
  if (!texts.length) texts.push(lines[at++]);
  const paragraph = append(out, "p");
  texts.forEach((one, index) => {
    if (index) append(paragraph, "br");
    inline(one, paragraph);
  });
  return at;
}

function begins(line) {
  return FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || BULLET.test(line) || NUMBERED.test(line);
}

function run(lines, at, pattern) {
  const texts = [];
  for (let found; at < lines.length && (found = lines[at].match(pattern)); at++) texts.push(found[1]);
  return [at, texts];
}

function code(lines, at, mark, out) {
  const texts = [];
  while (at < lines.length && !lines[at].trim().startsWith(mark)) texts.push(lines[at++]);
  const pre = append(out, "pre");
  pre.tabIndex = 0;
  append(pre, "code").textContent = texts.join("\n");
  return at + 1;
}

function table(lines, at, out) {
  const cells = (line) => line.match(ROW)[1].split("|").map((one) => one.trim());
  const made = append(out, "table");
  const head = append(append(made, "thead"), "tr");
  for (const one of cells(lines[at])) {
    const cell = append(head, "th");
    cell.scope = "col";
    inline(one, cell);
  }
  const body = append(made, "tbody");
  for (at += 2; at < lines.length && ROW.test(lines[at]); at++) {
    const row = append(body, "tr");
    for (const one of cells(lines[at])) inline(one, append(row, "td"));
  }
  return at;
}

const INLINE = /(`+)([^`\n]{1,2000}?)\1(?!`)|\*\*([^*\n]{1,500}?)\*\*|\*([^*\n]{1,500}?)\*|\[([^\]\n]{1,500})\]\(([^()\s]{1,1000})\)|(https?:\/\/[^\s<>()"']{1,1000})/g;

function inline(text, into) {
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    into.append(text.slice(at, found.index));
    at = found.index + found[0].length;
    const [whole, , codeText, strong, emphasis, label, target, bare] = found;
    if (codeText !== undefined) append(into, "code").textContent = codeText;
    else if (strong !== undefined) append(into, "strong").textContent = strong;
    else if (emphasis !== undefined) append(into, "em").textContent = emphasis;
    else if (bare !== undefined) link(into, bare, bare);
    else if (SAFE.test(target)) link(into, label, target);
    else into.append(whole);
  }
  into.append(text.slice(at));
}

function link(into, label, target) {
  const made = append(into, "a");
  made.href = target;
  made.rel = "noopener noreferrer nofollow";
  made.target = "_blank";
  made.textContent = label;
}

function append(into, tag) {
  const made = document.createElement(tag);
  into.append(made);
  return made;
}
