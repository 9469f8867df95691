// The data, its texts, and what each label (a line, a scope, a module, a kernel) has of the whole.
const data = JSON.parse(document.getElementById("data").textContent);
data.nodes.forEach((node, position) => { node.position = position; });
const topLevel = data.graphs.map(() => []); // nodes of each graph that are in no body; at their index
for (const node of data.nodes) if (!node.depth) topLevel[node.graph].push(node);

const state = {
  measure: data.clock === null ? "nodes" : "time",
  graph: -1, // all
  view: "lines",
  query: "",
  kind: "",
  label: null, // {view, label}: only nodes that carry it
  sort: { column: "at", down: false },
  selected: null, // a position in data.nodes
};

const byId = (id) => document.getElementById(id);

function element(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

// Texts become text nodes, so nothing in a name is ever markup.
function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function shortFiles(files) {
  // As many directories as it takes to tell files of one name apart.
  const parts = files.map((file) => file.path.split(/[\\/]/));
  return parts.map((mine, at) => {
    for (let length = 1; length < mine.length; length += 1) {
      const short = mine.slice(-length).join("/");
      if (parts.every((other, number) => number === at || other.slice(-length).join("/") !== short)) return short;
    }
    return files[at].path;
  });
}
const fileNames = shortFiles(data.files);

function frameText(id) {
  const frame = data.frames[id];
  return frame.text ?? `${fileNames[frame.file]}:${frame.line}`;
}

function frameFull(id) {
  const frame = data.frames[id];
  return frame.text ?? `${data.files[frame.file].path}:${frame.line}:${frame.function}`;
}

function frameCode(id) {
  const frame = data.frames[id];
  return frame.text === undefined ? (data.files[frame.file].lines[frame.line] ?? "").trim() : "";
}

const shortName = (node) => data.names[node.name].short || node.kind.replaceAll("_", " ");

// How the nodes can be summed up. A label is a text, or for lines the position of a frame.
const VIEWS = {
  lines: { title: "Lines", none: "(no source line)", labels: (node) => node.sources, text: frameText },
  source: { title: "Source", none: "", labels: (node) => node.sources, text: frameText },
  scopes: { title: "Scopes", none: "(no scope)", labels: (node) => node.scopes, text: String },
  modules: { title: "Modules", none: "(no module)", labels: (node) => node.modules, text: String },
  kernels: { title: "Kernels", none: "", labels: (node) => [shortName(node)], text: String },
};
const NONE = -1;

function labelsOf(node, view) {
  const labels = VIEWS[view].labels(node);
  return labels && labels.length ? labels : [NONE];
}

const labelText = (label, view) => (label === NONE ? VIEWS[view].none : VIEWS[view].text(label));

// Nanoseconds a call, or 1: what is inside a child node is no node of the graph by itself.
function weightOf(node) {
  if (state.measure === "nodes") return node.depth ? 0 : 1;
  return node.timing ? node.timing[1] / data.numCalls : 0;
}

const inGraph = (node) => state.graph === -1 || node.graph === state.graph;

// Time of a node with several labels is divided among them; where nodes are counted it counts for each.
function shares(view, nodes) {
  const found = new Map();
  for (const node of nodes) {
    const weight = weightOf(node);
    if (!weight) continue;
    const labels = labelsOf(node, view);
    const part = state.measure === "time" ? weight / labels.length : weight;
    for (const label of labels) {
      const share = found.get(label) ?? { label, weight: 0, shared: 0, nodes: [] };
      share.weight += part;
      if (labels.length > 1) share.shared += part;
      share.nodes.push(node);
      found.set(label, share);
    }
  }
  return [...found.values()].sort((one, other) => other.weight - one.weight);
}

// Instances of a graph take turns, so often only one of them ran while times were taken.
const timeOfGraph = topLevel.map(() => 0);
for (const node of data.nodes) timeOfGraph[node.graph] += node.timing ? node.timing[1] : 0;
const heaviestGraph = timeOfGraph.indexOf(Math.max(...timeOfGraph, 0));
if (timeOfGraph.length > 1 && timeOfGraph.filter(Boolean).length === 1) state.graph = heaviestGraph;

const sum = (nodes) => nodes.reduce((total, node) => total + weightOf(node), 0);

function timeText(nanoseconds) {
  for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
    const number = nanoseconds / size;
    if (number >= 1) return `${number < 100 ? number.toPrecision(3) : Math.round(number)} ${unit}`;
  }
  return `${Math.round(nanoseconds)} ns`;
}

const measured = (weight) => (state.measure === "time" ? timeText(weight) : weight.toLocaleString("en"));
const counted = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const percent = (part, whole) => `${(whole ? (100 * part) / whole : 0).toFixed(1)}%`;
