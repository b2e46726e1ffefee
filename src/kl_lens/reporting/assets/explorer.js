// The slider: the best plan for any budget, what it is made of, who else is of that size, and the command that makes it.
// Everything is computed here from the block of JSON in the page; every word goes in as text, never as markup.
(() => {
  const block = document.getElementById("explorer-data");
  if (!block) return;
  const { run, metrics } = JSON.parse(block.textContent);
  const place = document.getElementById("explorer");
  const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  const STEPS = 1000;

  // -- words, numbers, elements ---------------------------------------------------------------------------------------
  const SVG = new Set(["svg", "path", "line", "circle", "rect", "text", "g", "title"]);
  const el = (name, attributes = {}, ...children) => {
    const made = SVG.has(name) ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
    }
    made.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return made;
  };
  const number = (value, digits = 3) => {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(digits - 1).replace("e+", "e");
    return size < 10 ** (digits - 1) ? String(+value.toPrecision(digits)) : Math.round(value).toLocaleString("en");
  };
  // The error to one digit, the value to the same place.
  const withError = (value, error) => {
    if (!(error > 0) || !Number.isFinite(value)) return number(value) + (error === 0 ? " ± 0" : "");
    const place = -Math.floor(Math.log10(Number(error.toPrecision(1))));
    if (place >= 0 && place <= 5 && Math.abs(value) >= 1e-3) return `${value.toFixed(place)} ± ${error.toFixed(place)}`;
    return `${number(value, Math.max(1, place + 1 + Math.floor(Math.log10(Math.abs(value) || 1))))} ± ${number(error, 1)}`;
  };
  const bytes = (count) => {
    const sign = count < 0 ? "−" : "", size = Math.abs(count);
    const [unit, by] = size >= 1e9 ? ["GB", 1e9] : size >= 1e6 ? ["MB", 1e6] : size >= 1e3 ? ["kB", 1e3] : ["B", 1];
    return `${sign}${by === 1 ? size : (size / by).toFixed(2)} ${unit}`;
  };
  const signed = (value, show) => (value > 0 ? "+" : "") + (value === 0 ? "0" : show(value).replace(/^-/, "−"));
  const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
  const parsed = (text) => {
    const match = /^\s*([\d.]+(?:e[-+]?\d+)?)\s*([kmg]?)/i.exec(text.replaceAll(",", ""));
    return match ? Number(match[1]) * { "": 1, k: 1e3, m: 1e6, g: 1e9 }[match[2].toLowerCase()] : NaN;
  };

  // -- a target's choices and plans -----------------------------------------------------------------------------------
  const prepare = (run, space) => {
    const [members, recipes, sizes, kls] = [0, 1, 2, 3].map((k) => space.groups.map((group) => group[k]));
    const owner = new Map(members.flatMap((list, g) => list.map((c) => [c, g])));
    const rows = space.measured.map((list) => new Map(list.map((row) => [row[0], row])));
    const fp16 = space.recipes.indexOf("fp16");
    const s = { ...space, speed: null, basis: space.speed?.basis, run, members, choices: recipes, sizes, kls, owner, rows, none: fp16 };
    s.bySize = knapsack(kls, sizes);
    s.byLoss = knapsack(sizes, kls);
    s.error = (codes) => codes.reduce((total, r, c) => total + (rows[c].get(r)?.[3] ?? 0), 0);
    s.made = ({ picks, exact }) => {
      const codes = run.components.map((_, c) => (owner.has(c) ? recipes[owner.get(c)][picks[owner.get(c)]] : fp16));
      const sum = s.bySize.add(kls, picks);
      return { codes, picks, exact, bytes: space.fixed + s.bySize.add(sizes, picks), sum, kl: space.factor * sum, error: space.factor * s.error(codes) };
    };
    s.plans = space.plans.map((plan) => ({ ...plan, codes: [...plan.codes].map((digit) => (digit === "-" ? fp16 : DIGITS.indexOf(digit))) }));
    const ends = (k, table) => [k.add(table, k.least), k.add(table, k.greatest)];
    const [low, high] = ends(s.bySize, sizes), [most, least] = ends(s.bySize, kls);
    const floor = Math.max(least, most * 1e-5);
    s.modes = {
      size: { label: "size", unit: "file", ends: [space.fixed + low, space.fixed + high], log: true, show: bytes,
        plan: (limit, quick) => s.bySize.at(Math.floor(limit) - space.fixed, quick) },
      loss: { label: "allowed loss", unit: `nats per ${run.each}`, ends: [space.factor * floor, space.factor * most], log: true, show: number,
        plan: (limit, quick) => s.byLoss.at(limit / space.factor, quick) },
    };
    if (space.speed) {
      const { constant, rates, lookup } = space.speed;
      const seconds = sizes.map((list, g) => list.map((size, j) => (members[g][0] === lookup ? 0 : rates[recipes[g][j]] * size)));
      const byTime = knapsack(kls, seconds);
      s.speed = ({ picks }) => 1 / (constant + byTime.add(seconds, picks));
      s.modes.speed = { label: "tokens per second", unit: "tokens/s", ends: [byTime.greatest, byTime.least].map((picks) => s.speed({ picks })), show: number,
        plan: (limit, quick) => byTime.at(1 / limit - constant, quick) };
    }
    return s;
  };
  const valueAt = ({ ends: [low, high], log }, position) => {
    const share = position / STEPS;
    return log ? low * (high / low) ** share : low + share * (high - low);
  };
  const positionOf = ({ ends: [low, high], log }, value) => {
    const share = log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    return Math.round(STEPS * Math.min(1, Math.max(0, share)));
  };

  // -- the strip: kinds down, blocks across ---------------------------------------------------------------------------
  const strip = (run, open) => {
    const blocks = 1 + Math.max(-1, ...run.components.flatMap((c) => c[2]));
    const rows = [...new Set(run.components.filter((c) => c[2].length).map((c) => c[1]))];
    const cells = [];
    const cell = (c, block, style) => {
      const made = el("button", { type: "button", style, tabindex: cells.length ? -1 : 0, onclick: () => open(c) });
      cells.push({ c, block, made });
      return made;
    };
    const grid = el("div", { class: "cells", role: "group", "aria-label": "The plan over the network, one button for each component: arrows move, Enter opens" });
    grid.style.gridTemplateColumns = `max-content repeat(${Math.max(1, blocks)}, minmax(7px, 1fr))`;
    rows.forEach((row, r) => {
      grid.append(el("span", { style: `grid-area:${r + 1}/1` }, row));
      run.components.forEach((component, c) => {
        if (component[1] === row) for (const block of component[2]) grid.append(cell(c, block, `grid-area:${r + 1}/${block + 2}`));
      });
    });
    const every = blocks <= 16 ? 1 : blocks <= 40 ? 4 : 8;
    grid.append(el("span", { class: "ruler", style: `grid-area:${rows.length + 1}/1` }, "block"));
    for (let b = 0; b < blocks; b += every) grid.append(el("span", { class: "ruler", style: `grid-area:${rows.length + 1}/${b + 2}` }, String(b)));
    run.components.forEach((component, c) => {
      if (component[2].length) return;
      const at = rows.length + 2 + cells.filter((other) => other.block === null).length;
      grid.append(el("span", { style: `grid-area:${at}/1` }, component[1]), cell(c, null, `grid-area:${at}/2/${at + 1}/-1`));
    });
    grid.addEventListener("keydown", (event) => {
      const at = cells.findIndex(({ made }) => made === event.target), way = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const to = cells[event.key === "Home" ? 0 : event.key === "End" ? cells.length - 1 : at + way];
      if (at < 0 || !to) return;
      event.preventDefault();
      cells[at].made.tabIndex = -1;
      to.made.tabIndex = 0;
      to.made.focus();
    });
    const key = el("ul", { class: "legend" });
    const paint = (space, codes) => {
      for (const { c, block, made } of cells) {
        const words = `${run.components[c][0]}${block === null ? "" : `, block ${block}`}: ${space.recipes[codes[c]]}`;
        made.className = `tipped ${space.colours[codes[c]]}`;
        made.setAttribute("aria-label", words);
        made.dataset.tip = words.replace(": ", "\n");
      }
      const count = new Map();
      codes.forEach((r, c) => { const [n, w] = count.get(r) ?? [0, 0]; count.set(r, [n + 1, w + run.components[c][4]]); });
      key.replaceChildren(...[...count].sort(([p], [q]) => p - q).map(([r, [n, weights]]) =>
        el("li", {}, el("span", { class: `swatch ${space.colours[r]}` }), `${space.recipes[r]}: ${n} (${percent(weights / run.parameters)})`)));
    };
    return { figure: el("div", { class: "strip-map" }, grid, key), paint };
  };

  // -- a component's page ---------------------------------------------------------------------------------------------
  const dots = (list, scale) => {
    const width = 180, x = (value) => 6 + (width - 12) * scale(value);
    const svg = el("svg", { viewBox: `0 0 ${width} 18`, class: "dots", "aria-hidden": "true" }, el("path", { d: `M6 9H${width - 6}`, class: "grid" }));
    for (const value of list.windows) svg.append(el("circle", { cx: x(value).toFixed(1), cy: 9, r: 3.2, class: `m ${list.colour}` }));
    svg.append(el("path", { d: `M${x(list.mean).toFixed(1)} 2v14`, class: "mean" }));
    return svg;
  };
  const decoded = (text) => (text.match(/../g) ?? []).map((pair) => 1e-12 * 10 ** (15 * (DIGITS.indexOf(pair[0]) * 62 + DIGITS.indexOf(pair[1])) / 3843));
  const bars = (values, label, words) => {
    const top = Math.max(...values, 1e-30), step = 240 / values.length;
    return el("svg", { viewBox: "0 0 240 60", class: "bars", role: "img", "aria-label": label }, values.map((value, i) =>
      el("rect", { x: (i * step).toFixed(2), y: (60 - 58 * value / top).toFixed(2), width: (step - 0.8).toFixed(2), height: (58 * value / top).toFixed(2), class: "cell s0 tipped", "data-tip": words(i) })));
  };
  const componentPage = (space, plan, c, close) => {
    const { run } = space;
    const [name, , blocks, shape] = run.components[c];
    const mine = plan.codes[c], rows = [...space.rows[c].values()];
    const own = space.rows[c].get(mine), kl = own?.[2] ?? 0, size = own?.[1] ?? 2 * run.components[c][4];
    const all = rows.map((row) => ({ row, windows: decoded(row[4]), mean: row[2] }));
    const spread = all.flatMap(({ windows, mean }) => [...windows, mean]).filter((value) => value > 0).map(Math.log10);
    const [low, high] = [Math.min(...spread) - 0.1, Math.max(...spread) + 0.1];
    const scale = (value) => (Math.log10(Math.max(value, 10 ** low)) - low) / (high - low);
    const order = [...all.map(({ row }) => [row[0], row[1], row[2]]), [space.none, 2 * run.components[c][4], 0]].sort((p, q) => p[1] - q[1]);
    const at = order.findIndex(([r]) => r === mine);
    const step = (other, word) => other && el("li", {}, `One step ${word}, ${space.recipes[other[0]]}: ${signed(other[1] - size, bytes)}, KL ${signed(space.factor * (other[2] - kl), number)} nats per ${run.each}.`);
    const fused = space.owner.has(c) ? space.members[space.owner.get(c)].filter((m) => m !== c).map((m) => run.components[m][0]) : [];
    const heads = ["recipe", "bytes", `KL, nats per ${run.each}`, "on each window (log)", "instead: bytes", "instead: KL", "SQNR, dB", "Δ cross-entropy", run.each === "image" ? "same top class" : "same top token", `KL, 99 % of ${run.each}s`];
    const [, , sqnr, change, same, p99] = metrics.map((_, i) => 5 + i);
    const table = el("table", {},
      el("caption", {}, `Every recipe it was measured in, ${space.title} (✓: in the plan)`),
      el("thead", {}, el("tr", {}, heads.map((words, i) => el("th", { scope: "col", class: i === 0 || i === 3 ? null : "n" }, words)))),
      el("tbody", {}, all.map(({ row, windows, mean }) => el("tr", { class: row[0] === mine ? "loud" : null },
        el("th", { scope: "row" }, el("span", { class: `swatch ${space.colours[row[0]]}` }), space.recipes[row[0]] + (row[0] === mine ? " ✓" : "")),
        el("td", { class: "n" }, bytes(row[1])), el("td", { class: "n" }, withError(row[2], row[3])),
        el("td", {}, windows.length ? dots({ windows, mean, colour: space.colours[row[0]] }, scale) : "–"),
        el("td", { class: "n" }, row[0] === mine ? "" : signed(row[1] - size, bytes)),
        el("td", { class: "n" }, row[0] === mine ? "" : signed(space.factor * (row[2] - kl), number)),
        ...[row[sqnr]?.toFixed(1), number(row[change]), row[same] === null ? "–" : percent(row[same]), number(row[p99])].map((words) => el("td", { class: "n" }, words ?? "–"))))));
    const seen = run.seen[c] ?? {}, parts = [];
    if (seen.weights) {
      const { bars: shares, most, rms } = seen.weights;
      parts.push(el("figure", {}, el("figcaption", {}, el("b", {}, "Its weights "), el("span", {}, `from −4 to 4 root mean squares (${number(rms)}); the largest is ${number(most)} of them`)),
        bars(shares, `Distribution of the weights; the largest is ${number(most)} root mean squares`, (i) => `${((i + 0.5) * 8 / shares.length - 4).toFixed(1)} rms: ${(shares[i] / 10).toFixed(1)} % of the weights`)));
    }
    if (seen.inputs) {
      const { largest, rms } = seen.inputs;
      parts.push(el("figure", {}, el("figcaption", {}, el("b", {}, "The largest columns of its inputs "), el("span", {}, `root mean square on the calibration text; over all columns ${number(rms)}`)),
        bars(largest.map(([, value]) => value), `Largest input columns: ${largest.map(([column, value]) => `${column}: ${number(value)}`).join(", ")}`, (i) => `column ${largest[i][0]}: ${number(largest[i][1])}, ${number(largest[i][1] / rms)} times the usual`)));
    }
    const heading = el("h3", { tabindex: -1 }, name);
    const share = plan.sum > 0 ? ` It is ${percent(kl / plan.sum)} of what the plan is predicted to lose.` : "";
    const page = el("div", { class: "component", role: "region", "aria-label": `Component ${name}` },
      el("button", { type: "button", class: "toggle", onclick: close }, "Close"), heading,
      el("p", {}, `${shape.join(" × ")}${blocks.length ? `, block ${blocks.join(", ")}` : ""}. The plan gives it ${space.recipes[mine]}: ${bytes(size)}, KL ${own ? withError(own[2], own[3]) : "0"} alone.${share}`),
      fused.length ? el("p", { class: "note" }, `It shares a recipe with ${fused.join(", ")}: runtimes fuse them.`) : null,
      el("ul", { class: "plain" }, step(order[at - 1], "down"), step(order[at + 1], "up")),
      el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Recipes of this component" }, table),
      parts.length ? el("div", { class: "grid" }, parts) : el("p", { class: "note" }, "kl-lens calibrate adds the distribution of its weights and inputs."));
    return { page, heading };
  };

  // -- two plans side by side -----------------------------------------------------------------------------------------
  const pins = []; // {space, plan, label}
  const difference = (open) => {
    if (!pins.length) return [];
    const unpin = el("button", { type: "button", class: "toggle", onclick: () => { pins.length = 0; showPins(open); } }, "Unpin");
    if (pins.length === 1) return [el("p", {}, `Pinned: ${pins[0].label}. Choose a second to compare. `, unpin)];
    const [a, b] = pins, { run } = a.space;
    const kl = (pin, c) => pin.space.rows[c].get(pin.plan.codes[c])?.[2] ?? (pin.plan.codes[c] === pin.space.none ? 0 : NaN);
    const size = (pin, c) => pin.space.rows[c].get(pin.plan.codes[c])?.[1] ?? (pin.plan.codes[c] === pin.space.none ? 2 * run.components[c][4] : NaN);
    const rows = run.components.map((_, c) => c)
      .filter((c) => a.space.recipes[a.plan.codes[c]] !== b.space.recipes[b.plan.codes[c]])
      .map((c) => ({ c, kl: kl(b, c) - kl(a, c), bytes: size(b, c) - size(a, c) }))
      .sort((p, q) => (Math.abs(q.kl) || 0) - (Math.abs(p.kl) || 0));
    const said = ({ plan, label }) => `${label}: ${bytes(plan.bytes)}, KL ${plan.measured === undefined ? `${withError(plan.kl, plan.error)} predicted` : plan.measured === null ? "not measured" : `${withError(plan.measured, plan.error)} measured`}`;
    const known = (value, show) => (Number.isNaN(value) ? "not measured" : signed(value, show));
    return [el("p", {}, `${said(a)}. ${said(b)}. They differ in ${rows.length} of ${run.components.length} components; below, what changes from the first to the second, each component alone. `, unpin),
      el("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "Pinned plans, component by component" }, el("table", {},
        el("caption", {}, "Component by component"),
        el("thead", {}, el("tr", {}, ["component", a.label, b.label, "bytes", "KL"].map((words, i) => el("th", { scope: "col", class: i > 2 ? "n" : null }, words)))),
        el("tbody", {}, rows.slice(0, 200).map((row) => el("tr", {},
          el("th", { scope: "row" }, el("button", { type: "button", class: "link", onclick: () => open(row.c) }, run.components[row.c][0])),
          el("td", {}, a.space.recipes[a.plan.codes[row.c]]), el("td", {}, b.space.recipes[b.plan.codes[row.c]]),
          el("td", { class: "n" }, known(row.bytes, bytes)), el("td", { class: "n" }, known(row.kl, number)))))))];
  };
  const pinned = el("div", { id: "pinned", "aria-live": "polite" });
  const showPins = (open) => {
    pinned.replaceChildren(...difference(open));
    const names = new Set(pins.map((pin) => `${pin.space.target ?? ""}/${pin.plan.name}`));
    for (const mark of document.querySelectorAll("[data-plan]")) mark.classList.toggle("pinned", names.has(mark.dataset.plan));
  };
  const pin = (space, plan, label, open) => {
    const there = pins.findIndex((other) => other.space === space && other.plan.name === plan.name && plan.name);
    if (there >= 0) pins.splice(there, 1);
    else { if (pins.length === 2) pins.shift(); pins.push({ space, plan, label }); }
    showPins(open);
  };

  // -- one run --------------------------------------------------------------------------------------------------------
  const choose = (legend, name, options, chosen, changed) => el("fieldset", { class: "pick" }, el("legend", {}, legend), options.map(({ value, label, off }) =>
    el("label", { title: off }, el("input", { type: "radio", name, value, checked: value === chosen, disabled: Boolean(off), onchange: () => changed(value) }), el("span", {}, label))));
  const tile = (what, value, below, more = {}) => el("div", { class: "tile", ...more }, el("span", { class: "what" }, what), el("span", { class: "value" }, value), el("span", { class: "below" }, below));
  const single = (run) => {
    const spaces = run.spaces.map((space) => prepare(run, space));
    const star = spaces.find((space) => space.plans.some((plan) => plan.star)) ?? spaces[0];
    let space = star, mode = "size", limit, plan, opened = null, later;
    const slider = el("input", { type: "range", min: 0, max: STEPS, step: 1, id: "budget", "aria-labelledby": "budget-name" });
    const field = el("input", { type: "text", inputmode: "decimal", "aria-label": "Budget, exactly", size: 10 });
    const unit = el("span", { class: "quiet" }), bound = el("span");
    const worded = () => { unit.textContent = space.modes[mode].unit; bound.textContent = mode === "speed" ? "at least " : "at most "; };
    const target = el("div"), kinds = el("div"), tiles = el("div", { class: "tiles" }), rivals = el("div"), page = el("div"), command = el("code");
    const status = el("p", { class: "sr", role: "status" });
    const copy = el("button", { type: "button", class: "toggle", onclick: () => copied() }, "Copy");
    const keep = el("button", { type: "button", class: "toggle", onclick: () => pin(space, { ...plan, name: `at ${bytes(plan.bytes)}` }, `the plan at ${bytes(plan.bytes)}`, open) }, "Pin this plan");
    const copied = async () => {
      try { await navigator.clipboard.writeText(command.textContent); } catch {
        const range = document.createRange();
        range.selectNodeContents(command);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        document.execCommand("copy");
      }
      copy.textContent = "Copied";
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    };
    const close = () => { opened = null; page.replaceChildren(); };
    const openPage = (c, focus) => {
      opened = c;
      const { page: made, heading } = componentPage(space, plan, c, close);
      page.replaceChildren(made);
      if (focus) { heading.focus({ preventScroll: true }); made.scrollIntoView({ block: "nearest" }); }
    };
    const open = (c) => openPage(c, true);
    const map = strip(run, open);

    const nearest = (list) => [...list].sort((p, q) => Math.abs(p.bytes - plan.bytes) - Math.abs(q.bytes - plan.bytes));
    const showTiles = () => {
      const known = nearest(space.plans.filter((other) => other.ours && other.kl !== null))[0];
      const same = known && known.codes.every((r, c) => r === plan.codes[c]);
      const parts = space.factor === 1 ? "the sum of what each component does alone" : `the components alone add up to ${number(plan.sum)}; whole plans lost ${number(space.factor)} times that`;
      const bits = (8 * plan.codes.reduce((total, r, c) => total + (space.rows[c].get(r)?.[1] ?? 2 * run.components[c][4]), 0)) / run.components.reduce((total, c) => total + c[4], 0);
      const made = [
        tile("Size", bytes(plan.bytes), `${percent(plan.bytes / space.fp16)} of FP16 (${bytes(space.fp16)}); ${bits.toFixed(2)} bits for each weight that has a choice`, { "data-bytes": plan.bytes }),
        tile("Predicted KL", withError(plan.kl, plan.error), `nats per ${run.each}; ${parts}`, { "data-kl": plan.sum }),
      ];
      if (known) made.push(tile(same ? "Measured: this plan" : "Measured nearby", withError(known.kl, known.error), `${same ? "" : `${known.label}, ${bytes(known.bytes)}; `}${known.where}`));
      const timed = nearest(space.plans.filter((other) => other.speed))[0];
      if (space.speed) made.push(tile("Speed", `about ${number(space.speed(plan))} tokens/s`, `predicted ${space.basis}`));
      else if (timed) made.push(tile("Speed nearby", `${number(timed.speed)} tokens/s`, `${timed.label}, ${bytes(timed.bytes)}; ${space.no_speed}`));
      tiles.replaceChildren(...made);
    };
    const showRivals = () => {
      const others = space.plans.filter((other) => !other.ours && other.kl !== null && !other.codes.every((r) => r === space.none));
      const shown = [...nearest(others.filter((o) => o.bytes <= plan.bytes)).slice(0, 3), ...nearest(others.filter((o) => o.bytes > plan.bytes)).slice(0, 2)].sort((p, q) => q.bytes - p.bytes);
      const better = (other) => (plan.kl < other.kl ? `${number(other.kl / plan.kl, 2)} × less` : `${number(plan.kl / other.kl, 2)} × more`);
      rivals.replaceChildren(shown.length ? el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Rivals of about this size" }, el("table", {},
        el("caption", {}, "Stock recipes of about this size"),
        el("thead", {}, el("tr", {}, ["name", "size", "KL, measured", "this plan loses"].map((words, i) => el("th", { scope: "col", class: i ? "n" : null }, words)))),
        el("tbody", {}, shown.map((other) => el("tr", {},
          el("th", { scope: "row" }, el("button", { type: "button", class: "link", title: "pin it", onclick: () => pin(space, shownPlan(other), other.label, open) }, other.label)),
          el("td", { class: "n" }, bytes(other.bytes)),
          el("td", { class: "n" }, withError(other.kl, other.error)), el("td", { class: "n" }, better(other)))))))
        : el("p", { class: "note" }, "No stock recipe was measured for this target. kl-lens plan --rivals adds them."));
    };
    const showCommand = () => {
      // As long as `uniform_fp16`, whose file the sizes are reckoned from: a GGUF holds its plan's name.
      const name = `at${String(plan.bytes).padStart(10, "0")}`;
      // Rounded down to six digits: the fastest plan must stay within it.
      const step = 10 ** (Math.floor(Math.log10(limit)) - 5);
      const how = mode === "speed" ? `--min-speed ${+(Math.floor(limit / step) * step).toPrecision(6)}` : `--max-bytes ${plan.bytes}`;
      command.textContent = `${space.command} ${how} --name ${name}` + (space.target ? `\n${space.export} --plan ${name}` : "");
    };
    const showMarker = () => {
      for (const svg of document.querySelectorAll("svg[data-frame]")) {
        const group = svg.querySelector("g.here") ?? svg.appendChild(el("g", { class: "here", "aria-hidden": "true" }));
        const { x, y, unit: divisor } = JSON.parse(svg.dataset.frame);
        const placed = ([low, high, start, end, log], value) => start + (end - start) * (log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low));
        const [px, py] = [placed(x, plan.bytes / divisor), placed(y, plan.kl)];
        const inside = svg.dataset.target === (space.target ?? "") && px >= x[2] && px <= x[3] && py >= y[3] && py <= y[2];
        group.replaceChildren(...(inside ? [el("path", { d: `M${px} ${y[3]}V${y[2]}`, class: "rule" }), el("circle", { cx: px, cy: py, r: 6.5 })] : []));
      }
    };
    const draw = (answer) => {
      plan = space.made(answer);
      place.dataset.exact = answer.exact;
      showTiles(); showRivals(); showCommand(); showMarker();
      map.paint(space, plan.codes);
      if (opened !== null) openPage(opened, false);
      slider.setAttribute("aria-valuetext", `${space.modes[mode].show(limit)} ${space.modes[mode].unit}: ${bytes(plan.bytes)}, predicted KL ${number(plan.kl)}`);
    };
    const set = (value, typed = false) => {
      const chosen = space.modes[mode];
      limit = Math.min(Math.max(value, chosen.ends[0]), Math.max(...chosen.ends));
      if (mode === "size") limit = Math.floor(limit);
      slider.value = positionOf(chosen, limit);
      if (!typed) field.value = chosen.show(limit);
      const begin = performance.now();
      const first = chosen.plan(limit, true) ?? chosen.plan(mode === "speed" ? chosen.ends[1] * (1 - 1e-6) : chosen.ends[0] * (1 + 1e-9));
      draw(first);
      place.dataset.ms = (performance.now() - begin).toFixed(1);
      clearTimeout(later);
      // The proof may take longer than a finger moves: it follows when the slider rests.
      later = setTimeout(() => {
        if (!first.exact) draw(chosen.plan(limit) ?? first);
        place.dataset.settled = limit;
        status.textContent = slider.getAttribute("aria-valuetext");
      }, first.exact ? 150 : 40);
      delete place.dataset.settled;
    };
    const shownPlan = (other) => ({ ...other, measured: other.kl, sum: NaN });
    const knobs = () => {
      const off = { speed: space.modes.speed ? null : space.no_speed || "weights alone have no speed" };
      target.replaceChildren(spaces.length > 1 ? choose("For", "target", spaces.map((s) => ({ value: s.target ?? "", label: s.title })), space.target ?? "", (value) => { space = spaces.find((s) => (s.target ?? "") === value); begin(); }) : el("p", { class: "quiet" }, `For ${space.title}`));
      kinds.replaceChildren(choose("Budget", "mode", [["size", "Size"], ["loss", "Allowed loss"], ["speed", "Tokens per second"]].map(([value, label]) => ({ value, label, off: off[value] })), mode, (value) => {
        const from = plan;
        mode = value;
        worded();
        set({ size: from.bytes, loss: from.kl * (1 + 1e-9), speed: space.speed?.(from) * (1 - 1e-9) }[mode]);
      }));
      worded();
    };
    const begin = () => {
      if (!space.modes[mode]) mode = "size";
      knobs();
      const recommended = space.plans.find((other) => other.star);
      plan = null;
      close();
      const at = recommended?.bytes ?? valueAt(space.modes.size, STEPS / 3);
      if (mode === "size") set(at); else { const kept = mode; mode = "size"; set(at); mode = kept; set(kept === "loss" ? plan.kl * (1 + 1e-9) : space.speed(plan)); }
    };
    slider.addEventListener("input", () => set(valueAt(space.modes[mode], Number(slider.value))));
    field.addEventListener("change", () => { const value = parsed(field.value); if (value > 0) set(value, true); });
    place.replaceChildren(
      el("h3", { id: "budget-name" }, "Try another budget"),
      el("div", { class: "knobs" }, target, kinds, el("label", { class: "exactly" }, bound, field, " ", unit)), slider, tiles,
      el("div", { class: "grid" }, el("div", {}, map.figure), rivals),
      el("div", { class: "copy" }, el("pre", {}, command), copy, keep), page, status);
    document.querySelector(".charts")?.after(pinned);
    if (!pinned.isConnected) place.append(pinned);

    // Marks of the charts, cells of the heat maps and rows of the table lead here.
    for (const mark of document.querySelectorAll("[data-plan]")) {
      const owner = spaces.find((s) => mark.dataset.plan.startsWith(`${s.target ?? ""}/`));
      const other = owner?.plans.find((p) => `${owner.target ?? ""}/${p.name}` === mark.dataset.plan);
      if (!other) continue;
      const act = () => pin(owner, shownPlan(other), other.label, open);
      mark.classList.add("pinnable");
      mark.addEventListener("click", act);
      mark.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); } });
    }
    const byName = new Map(run.components.map((component, c) => [component[0], c]));
    for (const cell of document.querySelectorAll("#sensitivity .cell")) {
      const name = cell.querySelector("title")?.textContent.split("\n")[0].replace(/, block \d+$/, "");
      if (byName.has(name)) { cell.dataset.name = name; cell.addEventListener("click", () => open(byName.get(name))); }
    }
    for (const row of document.querySelectorAll(".layers tbody tr")) {
      const cell = row.cells[0], c = byName.get(cell.textContent);
      if (c !== undefined) cell.replaceChildren(el("button", { type: "button", class: "link", onclick: () => open(c) }, cell.textContent));
    }
    begin();
  };
  single(run);
})();
