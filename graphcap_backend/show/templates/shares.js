// Bars: shares by line, scope, module and kernel, and the source with bars beside it.
const SHOWN_FIRST = 25;
const CONTEXT_LINES = 3;

function bar(share, whole) {
  const own = element("i", { class: "own" });
  const shared = element("i", { class: "shared" });
  own.style.width = percent(share.weight - share.shared, whole);
  shared.style.width = percent(share.shared, whole);
  return element("span", { class: "bar", "aria-hidden": "true" }, own, shared);
}

function drawTabs() {
  const tabs = Object.entries(VIEWS).map(([view, { title }]) => element("button", {
    type: "button", role: "tab", id: `tab-${view}`, "aria-controls": "shares",
    "aria-selected": String(view === state.view), tabindex: view === state.view ? 0 : -1,
    onclick: () => showView(view), onkeydown: moveTab,
  }, title));
  byId("tabs").replaceChildren(...tabs);
}

function showView(view) {
  state.view = view;
  drawTabs();
  drawShares();
}

function moveTab(event) {
  const views = Object.keys(VIEWS);
  const at = views.indexOf(state.view);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  showView(views.at(to % views.length));
  byId(`tab-${state.view}`).focus();
}

function drawShares(all = false) {
  const panel = byId("shares");
  panel.setAttribute("aria-labelledby", `tab-${state.view}`);
  const nodes = data.nodes.filter(inGraph);
  const whole = sum(nodes);
  const found = shares(state.view, nodes);
  byId("shares-note").replaceChildren(...sharesNote(whole, found));
  if (state.view === "source") {
    panel.replaceChildren(...sourceListing(found, whole));
    return;
  }
  const shown = all ? found : found.slice(0, SHOWN_FIRST);
  // Bars are drawn against the longest: the percent beside them is of the whole.
  const longest = Math.max(...found.map((share) => share.weight), 0);
  panel.replaceChildren(...shown.map((share) => shareRow(share, longest, whole)));
  if (shown.length < found.length) {
    panel.append(element("button", { type: "button", class: "more", onclick: () => drawShares(true) },
      `Show all ${found.length.toLocaleString("en")}`));
  }
  if (state.view === "kernels" && state.measure === "time") panel.append(...outsideRows());
}

function sharesNote(whole, found) {
  const each = state.measure === "time"
    ? `${timeText(whole)} ${data.clock === "cuda" ? "of GPU time" : "of launches on the CPU"} a call.`
    : `${counted(whole, "node")}.`;
  if (!found.some((share) => share.shared)) return [each];
  const how = state.measure === "time" ? "divided equally among them" : "counted for each";
  return [`${each} `, element("i", { class: "shared key", "aria-hidden": "true" }),
    ` Kernels with several ${state.view === "source" ? "lines" : VIEWS[state.view].title.toLowerCase()}, ${how}.`];
}

function shareRow(share, longest, whole) {
  const context = element("div", { class: "context", hidden: true });
  const code = state.view === "lines" && share.label !== NONE ? frameCode(share.label) : "";
  const full = state.view === "lines" && share.label !== NONE ? frameFull(share.label) : labelText(share.label, state.view);
  const button = element("button", { type: "button", class: "share", "aria-expanded": "false", title: full,
    onclick: () => {
      const open = context.hidden;
      if (open) context.replaceChildren(...shareContext(share, whole));
      context.hidden = !open;
      button.setAttribute("aria-expanded", String(open));
    } },
  bar(share, longest),
  element("span", { class: "value" }, measured(share.weight)),
  element("span", { class: "percent" }, percent(share.weight, whole)),
  element("span", { class: "label" }, labelText(share.label, state.view)),
  element("code", { class: "code" }, code));
  return element("div", { class: "share-group" }, button, context);
}

function shareContext(share, whole) {
  const parts = [];
  const frame = state.view === "lines" && share.label !== NONE ? data.frames[share.label] : null;
  if (frame && frame.text === undefined) {
    parts.push(element("p", { class: "where" }, frameFull(share.label)), excerpt(frame.file, new Set([frame.line]), whole));
  }
  const inner = state.view === "kernels" ? "lines" : "kernels";
  const within = shares(inner, share.nodes).slice(0, 8);
  parts.push(element("p", {}, `${counted(share.nodes.length, "node")}, by ${inner === "lines" ? "line" : "kernel"}: `,
    within.map((each) => `${labelText(each.label, inner)} (${measured(each.weight)})`).join(", "), "."));
  const chosen = { view: state.view, label: share.label };
  parts.push(element("button", { type: "button", class: "show-nodes", onclick: () => filterByLabel(chosen) },
    `Show ${share.nodes.length === 1 ? "this node" : "these nodes"} in the table`));
  return parts;
}

function outsideRows() {
  if (!data.outside.length) return [];
  const rows = data.outside.map((each) => ({ name: each.name, weight: each.ns / data.numCalls, shared: 0 }));
  const whole = rows.reduce((total, row) => total + row.weight, 0);
  return [element("h3", {}, `Outside of the graphs: ${timeText(whole)} a call`),
    ...rows.map((row) => element("div", { class: "share" }, bar(row, whole),
      element("span", { class: "value" }, timeText(row.weight)),
      element("span", { class: "percent" }, percent(row.weight, whole)),
      element("span", { class: "label" }, row.name)))];
}

// Every file with its lines in order; what is far from any weighed line is left out.
function sourceListing(found, whole) {
  const files = new Map();
  const rest = [];
  for (const share of found) {
    const frame = share.label === NONE ? null : data.frames[share.label];
    if (!frame || frame.text !== undefined) { rest.push(share); continue; }
    const file = files.get(frame.file) ?? { file: frame.file, weight: 0, shared: 0, lines: new Set() };
    file.weight += share.weight;
    file.shared += share.shared;
    file.lines.add(frame.line);
    files.set(frame.file, file);
  }
  const sorted = [...files.values()].sort((one, other) => other.weight - one.weight);
  const parts = sorted.map((file, at) => element("details", { class: "file", open: at < 4 },
    element("summary", { title: data.files[file.file].path }, element("strong", {}, fileNames[file.file]),
      ` ${measured(file.weight)}${state.measure === "time" ? `, ${percent(file.weight, whole)}` : ""}`),
    excerpt(file.file, file.lines, whole)));
  const without = rest.reduce((total, share) => total + share.weight, 0);
  if (without) parts.push(element("p", {}, `${measured(without)} (${percent(without, whole)}) without a source line.`));
  return parts;
}

function excerpt(file, lines, whole) {
  const weights = new Map();
  for (const share of shares("lines", data.nodes.filter(inGraph))) {
    const frame = share.label === NONE ? null : data.frames[share.label];
    if (!frame || frame.file !== file) continue;
    const line = weights.get(frame.line) ?? { weight: 0, shared: 0 }; // one line may be of several functions
    weights.set(frame.line, { weight: line.weight + share.weight, shared: line.shared + share.shared });
  }
  const text = data.files[file].lines;
  const shown = new Set(lines);
  for (const line of lines) {
    for (let near = line - CONTEXT_LINES; near <= line + CONTEXT_LINES; near += 1) if (near in text) shown.add(near);
  }
  const longest = Math.max(...[...weights.values()].map((each) => each.weight), 0);
  const numbers = [...shown].sort((one, other) => one - other);
  const rows = numbers.flatMap((number, at) => {
    const weight = weights.get(number);
    const gap = at > 0 && number > numbers[at - 1] + 1 ? [element("div", { class: "gap" }, "⋯")] : [];
    return [...gap, element("div", { class: `source-line${lines.has(number) ? " named" : ""}` },
      weight ? bar(weight, longest) : element("span", { class: "bar" }),
      element("span", { class: "value" }, weight ? measured(weight.weight) : ""),
      element("span", { class: "number" }, String(number)),
      element("code", {}, text[number] ?? "(source was not there when this was saved)"))];
  });
  return element("div", { class: "excerpt", tabindex: 0, role: "region", "aria-label": `Source of ${fileNames[file]}` }, ...rows);
}
