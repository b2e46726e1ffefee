// The best plan within a budget, exactly: one choice for each group, least cost, total amount within a limit. It is the
// problem that `kl-lens plan` gives to HiGHS, solved by a price per unit of the amount (hull), and dynamic programming
// over the few choices that could still improve on what that price finds.
"use strict";
const knapsack = (costs, amounts) => {
  const NARROW = 60, MOST = 20000; // states kept by the quick search, and by the one that proves
  const groups = costs.map((_, g) => g);
  const add = (table, picks) => picks.reduce((total, j, g) => total + table[g][j], 0);
  // Corners of each group's lower convex hull, from the least amount to the least cost.
  const corners = groups.map((g) => {
    const [cost, amount] = [costs[g], amounts[g]];
    const slope = (p, q) => (cost[q] - cost[p]) / (amount[q] - amount[p]);
    const hull = [];
    for (const j of [...cost.keys()].sort((p, q) => amount[p] - amount[q] || cost[p] - cost[q])) {
      if (hull.length && cost[j] >= cost[hull.at(-1)]) continue;
      while (hull.length > 1 && slope(hull.at(-2), hull.at(-1)) >= slope(hull.at(-1), j)) hull.pop();
      hull.push(j);
    }
    return hull;
  });
  const steps = groups.flatMap((g) => corners[g].slice(1).map((to, i) => {
    const from = corners[g][i], more = amounts[g][to] - amounts[g][from];
    return { g, to, more, gain: (costs[g][from] - costs[g][to]) / more };
  })).sort((p, q) => q.gain - p.gain);
  const least = corners.map((hull) => hull[0]);

  // {picks, exact}, or null where nothing fits. `quick` stops after the narrow search: near, and at once.
  const at = (limit, quick = false) => {
    const picks = [...least], blocked = new Set();
    let room = limit - add(amounts, picks), price = 0;
    if (room < 0) return null;
    for (const { g, to, more, gain } of steps) {
      if (blocked.has(g)) continue;
      if (more <= room) { picks[g] = to; room -= more; } else { price ||= gain; blocked.add(g); }
    }
    if (!price) return { picks, exact: true };
    // Every selection costs a constant, what its choices cost beyond their group's best at this price, and the price of
    // the room that it leaves. `gap` is that of the best selection known; whatever exceeds it alone is out.
    const base = groups.map((g) => costs[g].reduce(
      (best, c, j) => (c + price * amounts[g][j] < costs[g][best] + price * amounts[g][best] ? j : best), 0));
    const extra = (g, j) => costs[g][j] - costs[g][base[g]] + price * (amounts[g][j] - amounts[g][base[g]]);
    const start = limit - add(amounts, base);
    let gap = picks.reduce((total, j, g) => total + extra(g, j), 0) + price * room;
    const search = (widest) => {
      const open = [];
      for (const g of groups) {
        const js = [...costs[g].keys()].filter((j) => j !== base[g] && extra(g, j) < gap);
        if (!js.length) continue;
        const extras = js.map((j) => extra(g, j));
        open.push({ g, js, extras, first: Math.min(...extras), more: js.map((j) => amounts[g][j] - amounts[g][base[g]]) });
      }
      open.sort((p, q) => p.first - q.first);
      const up = [0], down = [0]; // how much the groups behind can still take, or give back
      for (const { more } of [...open].reverse()) {
        up.unshift(up[0] + Math.max(0, ...more));
        down.unshift(down[0] - Math.min(0, ...more));
      }
      const trail = [];
      let slack = [start], lost = [0], best = null, whole = true;
      const note = (stage) => slack.forEach((left, n) => {
        if (left >= 0 && lost[n] + price * left < gap) { gap = lost[n] + price * left; best = [stage, n]; }
      });
      note(0);
      for (const [i, o] of open.entries()) {
        const fits = (left, worse) => left + down[i + 1] >= 0 && worse + price * Math.max(0, left - up[i + 1]) < gap;
        let states = { slack, lost, from: slack.map((_, n) => n), pick: slack.map(() => -1) };
        o.js.forEach((j, k) => {
          if (o.extras[k] >= gap) return;
          // Two lists that fall in slack become one, without what another beats in slack and in cost.
          const merged = { slack: [], lost: [], from: [], pick: [] };
          let a = 0, b = 0, cheapest = Infinity;
          while (a < states.slack.length || b < slack.length) {
            const left = b < slack.length ? slack[b] - o.more[k] : -Infinity, worse = lost[b] + o.extras[k];
            const own = a < states.slack.length && (states.slack[a] > left || (states.slack[a] === left && states.lost[a] <= worse));
            const x = own ? states.slack[a] : left, y = own ? states.lost[a] : worse;
            if (y + price * x < cheapest && fits(x, y)) {
              cheapest = y + price * x;
              merged.slack.push(x); merged.lost.push(y);
              merged.from.push(own ? states.from[a] : b); merged.pick.push(own ? states.pick[a] : j);
            }
            if (own) a++; else b++;
          }
          states = merged;
        });
        if (states.slack.length > widest) {
          whole = false;
          const value = states.slack.map((left, n) => states.lost[n] + 0.1 * price * Math.abs(left));
          const worst = [...value].sort((p, q) => p - q)[widest];
          const kept = [...value.keys()].filter((n) => value[n] < worst);
          for (const key of Object.keys(states)) states[key] = kept.map((n) => states[key][n]);
        }
        ({ slack, lost } = states);
        trail.push({ g: o.g, from: states.from, pick: states.pick });
        note(i + 1);
      }
      if (best) {
        let [stage, n] = best;
        for (const g of groups) picks[g] = base[g];
        while (stage-- > 0) {
          const { g, from, pick } = trail[stage];
          if (pick[n] >= 0) picks[g] = pick[n];
          n = from[n];
        }
      }
      return whole;
    };
    const exact = search(NARROW) || (!quick && search(MOST));
    return { picks, exact };
  };
  return { at, add, least, greatest: corners.map((hull) => hull.at(-1)) };
};
