// The page can be read without this script. It adds the slider, the map's switch, tooltips that follow pointer, finger
// and keyboard, and sorting of tables. It sends and loads nothing.
// Words only ever go in as text: what a model or file is called stays text.
(() => {
  // `3MB`, `3,5 GiB`, `40%` of FP16, `0.01`, `0,01 nats`: a number, or NaN. One comma alone is a decimal point.
  const UNITS = { "": 1, b: 1, k: 1e3, m: 1e6, g: 1e9, t: 1e12, ki: 2 ** 10, mi: 2 ** 20, gi: 2 ** 30, ti: 2 ** 40 };
  const parsed = (text, whole) => {
    const [, digits, unit] = /^\s*([\d.,]+(?:e[-+]?\d+)?)\s*(\S*?)(?:\s+per\s+\w+)?\s*$/i.exec(text) ?? [];
    if (digits === undefined) return NaN;
    const thousands = /^\d+,\d+[.]/.test(digits) || /,.*,/.test(digits);
    const value = Number(thousands ? digits.replaceAll(",", "") : digits.replace(",", "."));
    if (whole === undefined) return /^(nats?)?$/i.test(unit) ? value : NaN;
    if (unit === "%") return whole * value / 100;
    return value * (UNITS[unit.toLowerCase().replace(/(?<=.)b$/, "")] ?? NaN);
  };
  // The position of the slider within a limit (0: size, 1: KL), or undefined; and what to say.
  const chosen = ({ positions, whole }, text, by) => {
    if (!text.trim()) return [undefined, ""];
    const limit = parsed(text, by ? undefined : whole);
    if (!(limit >= 0)) return [undefined, `“${text}” is no ${by ? "KL; examples: 0.01, 1e-3" : "size; examples: 3MB, 40%"}`];
    const fits = positions.map((p, i) => i).filter((i) => positions[i][by] <= limit);
    if (!fits.length) return [undefined, `no file is as small: at least ${positions[0][5]}`];
    return [by ? fits[0] : fits.at(-1), ""];
  };
  if (typeof document === "undefined") {  // tests without a browser
    globalThis.chosen = chosen;
    return;
  }

  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "tooltip");
  document.body.append(tip);
  const hide = () => { tip.hidden = true; };
  const show = (words, x, y) => {
    tip.textContent = words;
    tip.hidden = false;
    const box = tip.getBoundingClientRect(), above = y - box.height - 12;
    tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${above > 8 ? above : Math.min(y + 18, innerHeight - box.height - 8)}px`;
  };

  // Charts: the description of each dot or cell is its tooltip; arrows move from one to the next.
  const MARK = "path[aria-label]";
  for (const group of document.querySelectorAll("figure g.dots_marks, figure g.cells_marks")) {
    const marks = [...group.querySelectorAll(MARK)];
    marks.forEach((mark, i) => mark.setAttribute("tabindex", i ? "-1" : "0"));
    group.closest("div[role=img]")?.setAttribute("role", "group");
    group.addEventListener("keydown", (event) => {
      const at = marks.indexOf(event.target), last = marks.length - 1;
      const next = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: last }[event.key];
      if (event.key === "Enter") event.target.dispatchEvent(new MouseEvent("click", { bubbles: true }));
      if (marks[next] === undefined) return;
      event.preventDefault();
      marks[at].setAttribute("tabindex", "-1");
      marks[next].setAttribute("tabindex", "0");
      marks[next].focus();
    });
  }
  const point = (event) => {
    const mark = event.target.closest?.(`figure ${MARK}`);
    if (mark) show(mark.getAttribute("aria-label"), event.clientX, event.clientY);
    else hide();
  };
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("focusin", (event) => {
    if (!event.target.matches(`figure ${MARK}:focus-visible`)) return;
    const box = event.target.getBoundingClientRect();
    show(event.target.getAttribute("aria-label"), box.left + box.width / 2, box.top);
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

  // The slider walks the frontier that Python computed; the map shows the plan at the slider, or one format.
  const block = document.getElementById("explorer-data");
  const { components, spaces } = block ? JSON.parse(block.textContent) : { spaces: [] };
  for (const place of document.querySelectorAll(".explorer")) {
    const space = spaces[place.dataset.space], find = (selector) => place.querySelector(selector);
    const slider = find("input[type=range]"), select = find("select"), reading = find(".reading"), made = find(".made");
    const cells = [...place.querySelectorAll(".cells_marks path")], hatches = [...place.querySelectorAll(".hatch_marks path")];
    const title = find(".map figcaption b"), about = find(".component");
    const here = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    here.setAttribute("r", 8);
    here.setAttribute("class", "here");
    find(".line svg .role-mark")?.parentNode.append(here);
    const told = (recipe, c) => `${space.recipes[recipe]}: ${space.kls[recipe]?.[c]?.[1] ?? "no number"}`;
    const paint = () => {
      const stored = space.positions[slider.value][4], plan = select.value === "plan";
      title.textContent = plan ? "The plan above (colours: bits per weight)" : `What each component loses alone in ${space.recipes[select.value]}`;
      cells.forEach((cell, k) => {
        const c = space.cells[k], recipe = plan ? stored[c] : Number(select.value);
        const [level, , predicted] = space.kls[recipe]?.[c] ?? [];
        cell.setAttribute("fill", (plan ? space.colours[recipe] : space.ramp[level]) ?? "var(--grid)");
        cell.setAttribute("aria-label", `${components[c]}\n${told(recipe, c)}`);
        hatches[k].setAttribute("opacity", predicted ? 1 : 0);
      });
    };
    const move = () => {
      const [bytes, kl, x, y, , size, loss, rest, file] = space.positions[slider.value];
      [size, loss, rest].forEach((words, i) => { reading.children[i].textContent = words; });
      made.textContent = file ? file : `${space.command} --max-bytes ${bytes} --name plan-${size.replace(" ", "")}`;
      slider.setAttribute("aria-valuetext", `${size}, ${loss}`);
      Object.assign(place.dataset, { bytes, kl, file });
      here.setAttribute("cx", x);
      here.setAttribute("cy", y);
      if (select.value === "plan") paint();
    };
    const open = (cell) => {
      const c = space.cells[cells.indexOf(cell)];
      if (c === undefined) return;
      about.replaceChildren(document.createElement("b"), document.createElement("ul"));
      about.children[0].textContent = components[c];
      space.kls.forEach((kls, recipe) => {
        const item = document.createElement("li");
        item.textContent = told(recipe, c) + (recipe === space.positions[slider.value][4][c] ? " (in the plan above)" : "");
        if (kls[c].length) about.children[1].append(item);
      });
    };
    for (const field of place.querySelectorAll(".limit")) {
      field.addEventListener("change", () => {
        const [index, words] = chosen(space, field.value, Number(field.dataset.by));
        find(".said").textContent = words;
        if (index !== undefined) slider.value = index;
        move();
      });
    }
    slider.addEventListener("input", move);
    select.addEventListener("change", paint);
    find(".map").addEventListener("click", (event) => open(event.target));
    for (const hidden of place.querySelectorAll("[hidden]")) hidden.hidden = false;
    move();
  }

  // What can be taken along: commands, and tables as text or CSV.
  const button = (words, act) => {
    const made = document.createElement("button");
    made.type = "button";
    made.className = "tool";
    made.textContent = words;
    made.addEventListener("click", async () => {
      await act();
      made.textContent = `${words} ✓`;
      setTimeout(() => { made.textContent = words; }, 1500);
    });
    return made;
  };
  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {  // not allowed here: the old way
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  };
  for (const pre of document.querySelectorAll("pre")) pre.after(button("Copy", () => copy(pre.textContent)));
  for (const table of document.querySelectorAll("table")) {
    const cells = (value) => [...table.rows].map((row) => [...row.cells].map(value));
    const name = (table.caption?.textContent ?? "table").toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 60);
    // A text that begins like a formula is not run by the spreadsheet that opens it.
    const quoted = (text) => `"${(/^[=+@-]/.test(text) && Number.isNaN(Number(text)) ? `'${text}` : text).replaceAll('"', '""')}"`;
    const tools = document.createElement("div");
    tools.className = "tools";
    tools.append(
      button("Copy", () => copy(cells((cell) => cell.textContent).map((row) => row.join("\t")).join("\n"))),
      button("CSV", () => {
        const link = document.createElement("a");
        const lines = cells((cell) => quoted(cell.dataset.v ?? cell.textContent)).map((row) => `${row.join(",")}\r\n`);
        link.href = `data:text/csv;charset=utf-8,${encodeURIComponent(`\ufeff${lines.join("")}`)}`;
        link.download = `${name}.csv`;
        link.click();
      }),
    );
    table.closest(".scroll").after(tools);
  }

  // Tables: numbers as numbers, text as people sort it (layers.2 before layers.10); what is not known goes last.
  const collator = new Intl.Collator("en", { numeric: true });
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button"), numeric = head.classList.contains("n");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      const value = ({ cells: { [column]: cell } }) => {
        const text = cell.dataset.v ?? cell.textContent;
        return numeric ? parseFloat(text.replaceAll(",", "").replace("∞", "Infinity")) : text;
      };
      button.addEventListener("click", () => {
        const before = head.getAttribute("aria-sort");
        // The first click on a number puts the largest on top: that is what one looks for.
        const ascending = before ? before === "descending" : !numeric, sign = ascending ? 1 : -1;
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows].map((row) => [value(row), row]);
        rows.sort(([a], [b]) => {
          if (!numeric) return sign * collator.compare(a, b);
          if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
          return a === b ? 0 : sign * (a < b ? -1 : 1);
        });
        table.tBodies[0].append(...rows.map(([, row]) => row));
      });
    });
  }
})();
