// Sends a photograph as it is, and shows what the networks answer, one beside the other.

const element = (id) => document.getElementById(id);
const maxBytes = Number(document.body.dataset.maxBytes);
const centreCrop = Number(document.body.dataset.centreCrop);
let waitingFor = null;

element("file").addEventListener("change", (event) => {
  const [file] = event.target.files;
  event.target.value = ""; // so that the same file can be chosen again
  if (file) classify(file);
});

// Anywhere on the page: a photograph that misses the frame would replace the page.
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dragging", name === "dragover");
    const [file] = name === "drop" ? event.dataTransfer.files : [];
    if (file) classify(file);
  });
}

// Makes the photograph as large as fits, and marks the central square, whose side is a share of the
// photograph's shorter one.
element("preview").addEventListener("load", ({ target: { naturalWidth, naturalHeight } }) => {
  const side = Math.min(naturalWidth, naturalHeight) * centreCrop;
  const width = (100 * side) / naturalWidth;
  const height = (100 * side) / naturalHeight;
  element("frame").style.width = `min(100%, ${(26 * naturalWidth) / naturalHeight}rem)`;
  Object.assign(element("crop").style, {
    width: `${width}%`,
    height: `${height}%`,
    left: `${(100 - width) / 2}%`,
    top: `${(100 - height) / 2}%`,
  });
});

async function classify(file) {
  waitingFor?.abort();
  const request = new AbortController();
  waitingFor = request;
  clear();
  if (file.size > maxBytes) {
    refuse(`the file is larger than ${maxBytes / 2 ** 20} MiB`);
    return;
  }
  document.body.classList.add("waiting");
  element("summary").textContent = `Looking at ${file.name} …`;
  try {
    const options = { method: "POST", body: file, signal: request.signal };
    const response = await fetch("classify", options);
    const answer = await response.json();
    if (request.signal.aborted) return;
    if (response.ok) show(file, answer.predictions);
    else refuse(answer.error);
  } catch (error) {
    // An aborted request has a successor, which shows its own answer.
    if (!request.signal.aborted) refuse(`the file could not be sent, or the server does not answer (${error.message})`);
  }
  if (waitingFor === request) document.body.classList.remove("waiting");
}

function clear() {
  document.body.classList.remove("waiting");
  URL.revokeObjectURL(element("preview").src);
  element("preview").removeAttribute("src");
  for (const id of ["error", "frame", "caption"]) element(id).hidden = true;
  element("invitation").hidden = false;
  document.querySelector("tbody").replaceChildren();
  for (const text of document.querySelectorAll(".latency")) text.textContent = "\u00a0";
}

function refuse(message) {
  element("summary").textContent = "No answer for this file.";
  element("error").textContent = `${message[0].toUpperCase()}${message.slice(1)}.`;
  element("error").hidden = false;
}

function show(file, predictions) {
  element("preview").src = URL.createObjectURL(file);
  element("preview").alt = file.name;
  element("invitation").hidden = true;
  for (const id of ["frame", "caption"]) element(id).hidden = false;
  element("summary").textContent = summaryOf(predictions);
  element("calls").textContent = predictions[0].calls;
  for (const { dtype, latency_ms } of predictions) {
    element(dtype).querySelector(".latency").textContent = `${latency_ms.toFixed(1)} ms`;
  }
  const guessed = predictions.flatMap(({ guesses }) => guesses.map(({ category }) => category));
  const rows = [...new Set(guessed)].map((category) => rowOf(category, predictions));
  document.querySelector("tbody").replaceChildren(...rows);
}

function summaryOf(predictions) {
  const silent = predictions.filter(({ guesses }) => !guesses.length).map(({ dtype }) => dtype);
  if (silent.length) {
    const [have, their] = silent.length > 1 ? ["have", "their"] : ["has", "its"];
    return `${silent.join(" and ")} ${have} no answer: ${their} numbers overflowed.`;
  }
  const first = predictions.map(({ dtype, guesses: [{ category }] }) => [dtype, category]);
  if (new Set(first.map(([, category]) => category)).size > 1) {
    return `They disagree: ${first.map(([dtype, category]) => `${dtype} says ${category}`).join(", ")}.`;
  }
  const category = first[0][1];
  const probabilities = predictions.map((prediction) => probabilityOf(category, prediction));
  const difference = 100 * (Math.max(...probabilities) - Math.min(...probabilities));
  const [who, most] = predictions.length > 2 ? ["All", "at most "] : ["Both", ""];
  const apart = difference < 0.005 ? "less than 0.01" : `${most}${difference.toFixed(2)}`;
  return `${who} say ${category}; their probabilities are ${apart} percentage points apart.`;
}

function probabilityOf(category, { guesses, others }) {
  return [...guesses, ...others].find((guess) => guess.category === category)?.probability;
}

function rowOf(category, predictions) {
  const row = document.createElement("tr");
  const name = partOf("th", "category", category);
  name.scope = "row";
  const fp32 = probabilityOf(category, predictions[0]);
  row.append(name, ...predictions.map((prediction) => cellOf(category, prediction, fp32)));
  return row;
}

function cellOf(category, prediction, fp32) {
  const probability = probabilityOf(category, prediction);
  const cell = partOf("td", prediction.dtype);
  if (probability === undefined) {
    cell.append(partOf("span", "probability", "not finite"));
    return cell;
  }
  cell.classList.toggle("likeliest", category === prediction.guesses[0].category);
  const bar = partOf("span", "bar");
  bar.setAttribute("aria-hidden", "true");
  bar.append(partOf("span", ""));
  bar.lastChild.style.width = `${100 * probability}%`;
  cell.append(partOf("span", "probability", `${(100 * probability).toFixed(2)} %`), bar);
  if (prediction.dtype !== "float32" && fp32 !== undefined) {
    cell.append(differenceOf(100 * (probability - fp32)));
  }
  return cell;
}

function differenceOf(percentagePoints) {
  const digits = Math.abs(percentagePoints).toFixed(2);
  if (digits === "0.00") return partOf("span", "difference none", "±0.00");
  return partOf("span", "difference", `${percentagePoints > 0 ? "+" : "−"}${digits}`);
}

function partOf(kind, name, text = "") {
  const part = document.createElement(kind);
  part.className = name;
  part.textContent = text;
  return part;
}
