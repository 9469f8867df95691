// The table of all nodes. Only the rows that are in sight are in the document.
const ROW_HEIGHT = 30;
const SPARE_ROWS = 8;
const COLUMNS = [
  { name: "at", title: "Node", key: (node) => node.position, text: (node) => node.at },
  { name: "graph", title: "Graph", key: (node) => node.graph, text: (node) => data.graphs[node.graph].name },
  { name: "kind", title: "Kind", key: (node) => node.kind, text: (node) => node.kind.replaceAll("_", " ") },
  { name: "kernel", title: "Name", key: shortName, text: shortName },
  { name: "scope", title: "Scope", key: (node) => (node.scopes ?? []).join(", "), text: (node) => (node.scopes ?? []).join(", ") },
  { name: "line", title: "Line", key: lineText, text: lineText },
  { name: "time", title: "Time", key: (node) => weightOf(node), text: (node) => (node.timing ? timeText(node.timing[1] / data.numCalls) : "") },
];
let visible = []; // the nodes that the filters leave, sorted
const haystacks = new Map();

function lineText(node) {
  const sources = node.sources ?? [];
  if (sources.length) return frameText(sources[0]) + (sources.length > 1 ? ` +${sources.length - 1}` : "");
  return node.stack === undefined ? "" : frameText(data.stacks[node.stack][0]);
}

function haystack(node) {
  let text = haystacks.get(node);
  if (text === undefined) {
    const frames = [...(node.sources ?? []), ...(node.stack === undefined ? [] : data.stacks[node.stack])];
    text = [node.at, node.kind, data.names[node.name].full, data.names[node.name].short, ...(node.scopes ?? []),
      ...(node.modules ?? []), ...frames.flatMap((id) => [frameText(id), frameFull(id), frameCode(id)])].join("\n").toLowerCase();
    haystacks.set(node, text);
  }
  return text;
}

function shownColumns() {
  return COLUMNS.filter(({ name }) => {
    if (name === "graph") return data.graphs.length > 1 && state.graph === -1;
    if (name === "time") return data.clock !== null;
    if (name === "scope") return data.nodes.some((node) => node.scopes);
    return true;
  });
}

function findNodes() {
  const words = state.query.toLowerCase().split(/\s+/).filter(Boolean);
  visible = data.nodes.filter((node) => inGraph(node)
    && (!state.kind || node.kind === state.kind)
    && (!state.label || labelsOf(node, state.label.view).includes(state.label.label))
    && words.every((word) => haystack(node).includes(word)));
  const { key } = COLUMNS.find(({ name }) => name === state.sort.column);
  const keyed = visible.map((node) => [key(node), node]);
  keyed.sort(([one], [other]) => (one < other ? -1 : one > other ? 1 : 0)); // stable: equal ones stay in launch order
  visible = keyed.map(([, node]) => node);
  if (state.sort.down) visible.reverse();
}

function drawTable() {
  findNodes();
  byId("found").textContent = visible.length === data.nodes.length
    ? counted(data.nodes.length, "node") : `${visible.length.toLocaleString("en")} of ${counted(data.nodes.length, "node")}`;
  const columns = shownColumns();
  const grid = byId("grid");
  grid.className = `grid ${columns.map(({ name }) => `has-${name}`).join(" ")}`;
  grid.setAttribute("aria-rowcount", String(visible.length + 1));
  byId("grid-head").replaceChildren(...columns.map(headCell));
  drawLabelFilter();
  byId("rows").style.height = `${visible.length * ROW_HEIGHT}px`;
  drawRows();
}

function headCell({ name, title }) {
  const sorted = state.sort.column === name;
  const order = sorted ? (state.sort.down ? "descending" : "ascending") : "none";
  return element("span", { role: "columnheader", class: `cell ${name}`, "aria-sort": order },
    element("button", { type: "button", onclick: () => sortBy(name) }, title + (sorted ? (state.sort.down ? " ↓" : " ↑") : "")));
}

function sortBy(column) {
  const again = state.sort.column === column;
  state.sort = { column, down: again ? !state.sort.down : column === "time" };
  drawTable();
  byId("grid-head").querySelector(`.${column} button`).focus();
}

function drawRows() {
  const grid = byId("grid");
  const first = Math.max(0, Math.floor(grid.scrollTop / ROW_HEIGHT) - SPARE_ROWS);
  const last = Math.min(visible.length, Math.ceil((grid.scrollTop + grid.clientHeight) / ROW_HEIGHT) + SPARE_ROWS);
  const columns = shownColumns();
  byId("rows").replaceChildren(...visible.slice(first, last).map((node, at) => tableRow(node, first + at, columns)));
  const selected = state.selected !== null && byId(`node-${state.selected}`);
  if (selected) grid.setAttribute("aria-activedescendant", selected.id);
  else grid.removeAttribute("aria-activedescendant");
}

function tableRow(node, at, columns) {
  const row = element("div", { role: "row", class: "row", id: `node-${node.position}`, "aria-rowindex": at + 2,
    "aria-selected": String(node.position === state.selected), onclick: () => select(node.position) },
  ...columns.map(({ name, text }) => element("span", { role: "gridcell", class: `cell ${name}`, title: text(node) }, text(node))));
  row.style.transform = `translateY(${at * ROW_HEIGHT}px)`;
  return row;
}

function revealRow() {
  const at = visible.findIndex((node) => node.position === state.selected);
  if (at === -1) return;
  const grid = byId("grid");
  const inSight = grid.clientHeight - ROW_HEIGHT; // the head covers the first row
  if (at * ROW_HEIGHT < grid.scrollTop) grid.scrollTop = at * ROW_HEIGHT;
  else if ((at + 1) * ROW_HEIGHT > grid.scrollTop + inSight) grid.scrollTop = (at + 1) * ROW_HEIGHT - inSight;
}

function moveInTable(event) {
  if (event.target !== byId("grid") || !visible.length) return;
  if (event.key === "Enter" && state.selected !== null) {
    event.preventDefault();
    byId("details").focus();
    return;
  }
  const at = visible.findIndex((node) => node.position === state.selected);
  const page = Math.max(1, Math.floor(byId("grid").clientHeight / ROW_HEIGHT) - 2);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: visible.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  select(visible[Math.max(0, Math.min(visible.length - 1, to))].position);
}

function filterByLabel(label) {
  state.label = label;
  drawTable();
  byId("grid").scrollTop = 0;
  byId("nodes").scrollIntoView({ block: "start" });
  byId("grid").focus({ preventScroll: true });
}

function drawLabelFilter() {
  const place = byId("label-filter");
  place.hidden = !state.label;
  if (!state.label) return;
  place.replaceChildren(element("button", { type: "button", class: "chip", "aria-label": `Drop the filter ${labelText(state.label.label, state.label.view)}`,
    onclick: () => { state.label = null; drawTable(); byId("grid").focus(); } },
  `${labelText(state.label.label, state.label.view)} ✕`));
}
