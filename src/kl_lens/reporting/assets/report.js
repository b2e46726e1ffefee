// The page can be read without this script. It adds the slider, the map's switch, tooltips that follow pointer, finger
// and keyboard, and sorting of tables. It sends and loads nothing.
// Words only ever go in as text: what a model or file is called stays text.
(() => {
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
  const parsed = (text) => {
    const match = /^\s*([\d.]+(?:e[-+]?\d+)?)\s*([kmg]?)/i.exec(text.replaceAll(",", ""));
    return match ? Number(match[1]) * { "": 1, k: 1e3, m: 1e6, g: 1e9 }[match[2].toLowerCase()] : NaN;
  };
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
      made.textContent = file ? `made already: ${file}` : `${space.command} --max-bytes ${bytes} --name plan-${size.replace(" ", "")}`;
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
        const limit = parsed(field.value), by = Number(field.dataset.by);
        const fits = space.positions.map((p, i) => i).filter((i) => space.positions[i][by] <= limit);
        if (fits.length) slider.value = by ? fits[0] : fits.at(-1);
        move();
      });
    }
    slider.addEventListener("input", move);
    select.addEventListener("change", paint);
    find(".map").addEventListener("click", (event) => open(event.target));
    for (const hidden of place.querySelectorAll("[hidden]")) hidden.hidden = false;
    move();
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
