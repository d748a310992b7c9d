"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  if (!data.views) return;
  const bytes = (amount) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = 0;
    while (Math.abs(amount) >= 999.5 && unit < units.length - 1) { amount /= 1024; unit += 1; }
    const digits = unit === 0 ? 0 : amount < 9.995 ? 2 : amount < 99.95 ? 1 : 0;
    return amount.toFixed(digits) + " " + units[unit];
  };
  const seconds = (amount) =>
    amount >= 1 ? amount.toPrecision(3) + " s"
      : amount >= 1e-3 ? (amount * 1e3).toPrecision(3) + " ms" : (amount * 1e6).toPrecision(3) + " us";
  const element = (tag, kind, text) => {
    const made = document.createElement(tag);
    if (kind) made.className = kind;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const describe = (op) => {
    const [name, path] = data.ops[op];
    return path && !name.startsWith(path) ? name + " in " + path : name;
  };
  const memory = document.getElementById("memory");
  const picture = memory.querySelector("svg");
  const cursor = memory.querySelector(".cursor");
  const held = document.getElementById("held");
  const totals = (view) => view.held.map((row) => row.reduce((sum, one) => sum + one, 0));
  for (const view of Object.values(data.views)) view.totals = totals(view);
  let shown = "plan";
  let at = 0;

  const show = (index) => {
    const view = data.views[shown];
    if (!view.ends.length) return;
    at = Math.max(0, Math.min(view.ends.length - 1, index));
    const start = at ? view.ends[at - 1] : 0;
    const middle = (500 * (start + view.ends[at])) / (data.seconds || 1);
    cursor.setAttribute("d", "M" + middle.toFixed(1) + " 0V1000");
    const heading = element("p");
    heading.append(
      element("b", "", bytes(view.totals[at])), " at " + seconds(start) + ", while ",
      element("b", "", describe(view.ops[at])),
      " runs (" + data.ops[view.ops[at]][2] + (view.again[at] ? ", computed again)" : ")"));
    const list = element("ul", "bars");
    const most = Math.max(...view.held[at], 1);
    view.groups.forEach(([name, colour], group) => {
      const amount = view.held[at][group];
      if (!amount) return;
      const row = element("li");
      const bar = element("span", "bar " + colour);
      bar.style.width = (100 * amount) / most + "%";
      row.append(element("span", "name", name), element("span", "amount", bytes(amount)), bar);
      list.append(row);
    });
    held.replaceChildren(heading, list);
  };
  const highest = () => show(data.views[shown].totals.indexOf(Math.max(...data.views[shown].totals)));
  const place = (event, svg) => {
    const box = svg.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  };
  const point = (event) => {
    const time = place(event, picture)[0] * (data.seconds || 1);
    const index = data.views[shown].ends.findIndex((end) => end >= time);
    show(index < 0 ? data.views[shown].ends.length - 1 : index);
  };
  memory.addEventListener("pointermove", point);
  memory.addEventListener("pointerdown", point);
  memory.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    show(at + move);
  });
  for (const button of document.querySelectorAll("#views button")) {
    button.addEventListener("click", () => {
      shown = button.dataset.view;
      for (const other of document.querySelectorAll("#views button"))
        other.setAttribute("aria-pressed", String(other === button));
      for (const view of picture.querySelectorAll(".view")) view.toggleAttribute("hidden", view.dataset.of !== shown);
      highest();
    });
  }
  highest();

  const schedule = document.getElementById("schedule");
  const pointed = document.getElementById("pointed");
  const tell = (event) => {
    const [x, y] = place(event, schedule.querySelector("svg"));
    const count = data.order.length;
    if (x < 0 || y < 0 || x >= 1 || y >= 1) return;
    const column = data.order[Math.floor(x * count)];
    const row = data.order[Math.floor(y * count)];
    pointed.textContent = "column: " + describe(column) + "; stage of " + describe(row);
  };
  schedule.addEventListener("pointermove", tell);
  schedule.addEventListener("pointerdown", tell);
})();
