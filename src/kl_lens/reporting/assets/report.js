// Everything on the page can be read without this script. It adds tooltips that follow pointer, finger and keyboard,
// sorting and filtering of tables, and a switch between light and dark. It sends nothing and loads nothing.
(() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "tooltip");
  document.body.append(tip);

  // Only ever textContent: what a model or file is called stays text.
  let shownAt = 0;
  const show = (words, x, y) => {
    shownAt = scrollY;
    tip.textContent = words;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, x + 14), innerWidth - box.width - 8);
    const above = y - box.height - 12;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above > 8 ? above : Math.min(y + 18, innerHeight - box.height - 8)}px`;
  };
  const hide = () => { tip.hidden = true; };

  // The browser's own tooltips come late and not at all on a phone: titles move here, for as long as the script runs.
  const words = new WeakMap();
  for (const group of document.querySelectorAll("g.marks")) {
    const marks = [];
    for (const mark of group.children) {
      const title = mark.querySelector("title");
      if (!title) continue;
      words.set(mark, title.textContent);
      title.remove();
      mark.setAttribute("tabindex", marks.length ? "-1" : "0");
      marks.push(mark);
    }
    const go = (from, to) => {
      if (!to) return;
      from.setAttribute("tabindex", "-1");
      to.setAttribute("tabindex", "0");
      to.focus();
    };
    group.addEventListener("keydown", (event) => {
      const at = marks.indexOf(event.target);
      const next = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: marks.length - 1 }[event.key];
      if (at < 0 || next === undefined) return;
      event.preventDefault();
      go(marks[at], marks[next]);
    });
    const point = (event) => {
      const said = words.get(event.target);
      if (said === undefined) hide();
      else show(said, event.clientX, event.clientY);
    };
    group.addEventListener("pointermove", point);
    group.addEventListener("pointerdown", point);
    group.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    group.addEventListener("focusin", (event) => {
      const said = words.get(event.target);
      if (said === undefined) return;
      event.target.setAttribute("role", "img");
      event.target.setAttribute("aria-label", said);
      const box = event.target.getBoundingClientRect();
      if (event.target.matches(":focus-visible")) show(said, box.left + box.width / 2, box.top);
    });
    group.addEventListener("focusout", hide);
  }
  document.addEventListener("pointerdown", (event) => {
    if (!event.target.closest("g.marks, [data-tip]")) hide();
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  // Scrolled away from what it explains; the event of a scroll that was over before the tip appeared does not count.
  addEventListener("scroll", (event) => {
    if (event.target !== document || Math.abs(scrollY - shownAt) > 4) hide();
  }, { passive: true, capture: true });

  // Whatever else has words of its own.
  const tipped = (event) => event.target.closest?.("[data-tip]");
  document.addEventListener("pointerover", (event) => { if (tipped(event)) show(tipped(event).dataset.tip, event.clientX, event.clientY); });
  document.addEventListener("pointerout", (event) => { if (tipped(event) && event.pointerType === "mouse") hide(); });
  document.addEventListener("focusin", (event) => {
    const at = tipped(event);
    if (!at?.matches(":focus-visible")) return;
    const box = at.getBoundingClientRect();
    show(at.dataset.tip, box.left + box.width / 2, box.top);
  });
  document.addEventListener("focusout", (event) => { if (tipped(event)) hide(); });

  // Tables: numbers as numbers, text as people sort it (layers.2 before layers.10); what is not known goes last.
  const collator = new Intl.Collator("en", { numeric: true });
  const value = (row, column, numeric) => {
    const cell = row.cells[column];
    const text = cell.dataset.v ?? cell.textContent;
    if (!numeric) return text;
    return parseFloat(text.replaceAll(",", "").replace("∞", "Infinity"));
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      const numeric = head.classList.contains("n");
      button.addEventListener("click", () => {
        const before = head.getAttribute("aria-sort");
        // The first click on a number puts the largest on top: that is what one looks for.
        const ascending = before ? before === "descending" : !numeric;
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
        const body = table.tBodies[0];
        const rows = [...body.rows].map((row) => [value(row, column, numeric), row]);
        rows.sort(([a], [b]) => {
          if (!numeric) return (ascending ? 1 : -1) * collator.compare(a, b);
          if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
          return a === b ? 0 : (ascending ? 1 : -1) * (a < b ? -1 : 1);
        });
        body.append(...rows.map(([, row]) => row));
      });
    });
  }
  for (const controls of document.querySelectorAll(".controls")) {
    const table = document.getElementById(controls.dataset.for);
    const fields = [...controls.querySelectorAll("[data-filter]")];
    const output = controls.querySelector("output");
    controls.hidden = false;
    const filter = () => {
      let shown = 0;
      for (const row of table.tBodies[0].rows) {
        const fits = fields.every((field) => {
          const text = row.cells[Number(field.dataset.filter)].textContent;
          if (!field.value) return true;
          return field.tagName === "SELECT" ? text === field.value : text.toLowerCase().includes(field.value.toLowerCase());
        });
        row.hidden = !fits;
        shown += fits;
      }
      output.textContent = `${shown} of ${table.tBodies[0].rows.length} rows`;
    };
    for (const field of fields) field.addEventListener("input", filter);
    filter();
  }

  // Light or dark: what the system says, until the button says otherwise.
  const button = document.querySelector(".toggle");
  if (button) {
    const system = matchMedia("(prefers-color-scheme: dark)");
    const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
    const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
    button.hidden = false;
    button.addEventListener("click", () => {
      document.documentElement.dataset.theme = isDark() ? "light" : "dark";
      name();
    });
    system.addEventListener("change", name);
    name();
  }
})();
