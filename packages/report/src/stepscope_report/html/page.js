"use strict";
// Says what is under the pointer, folds sections, zooms the charts over time, and names the command that draws a
// part of them as a timeline. The page is whole without it.
(() => {
  const root = document.documentElement, tip = document.getElementById("tip");
  document.addEventListener("mousemove", (event) => {
    const said = event.target.closest && event.target.closest("[data-t]");
    tip.hidden = !said;
    if (!said) return;
    tip.textContent = said.dataset.t;
    tip.style.left = Math.max(0, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)) + "px";
    const below = event.clientY + 16;
    tip.style.top = (below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 8 : below) + "px";
  });

  for (const title of document.querySelectorAll("section > h2")) {
    title.tabIndex = 0;
    title.title = "Fold or unfold";
    const fold = () => title.parentElement.classList.toggle("folded");
    title.addEventListener("click", fold);
    title.addEventListener("keydown", (event) => event.key === "Enter" && fold());
  }

  // The part of the window that is shown, from 0 to 1.
  let from = 0, until = 1;
  const charts = [...document.querySelectorAll(".chart")];
  const units = [[1e9, "s"], [1e6, "ms"], [1e3, "us"], [1, "ns"]];
  const duration = (ns, every) => {
    if (!ns) return "0";
    const [size, unit] = units.find(([size]) => Math.abs(ns) >= size) || units[3];
    const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(every / size) - 1e-9)));
    return (ns / size).toFixed(digits) + " " + unit;
  };
  const axis = (chart) => {
    const zoom = chart.querySelector(".axis .zoom"), ns = Number(chart.dataset.ns);
    const shown = (until - from) * ns;
    if (!zoom || !(shown > 0)) return;
    const size = 10 ** Math.floor(Math.log10(shown / 10));
    const every = Math.max(1, [1, 2, 5, 10].map((by) => by * size).find((by) => shown / by <= 10));
    const marks = [];
    for (let at = Math.ceil((from * ns) / every) * every; at <= until * ns; at += every) {
      const mark = document.createElement("b");
      mark.style.left = (100 * at) / ns + "%";
      mark.textContent = duration(at, every);
      marks.push(mark);
    }
    zoom.replaceChildren(...marks);
  };
  const show = (a, b) => {
    from = a;
    until = b;
    root.style.setProperty("--w", 100 / (b - a) + "%");
    root.style.setProperty("--l", (-100 * a) / (b - a) + "%");
    charts.forEach(axis);
    say(a, b);
  };

  // Above each chart, the command that draws the chosen part of the window as a timeline.
  const folder = decodeURIComponent(location.pathname).replace(/\/[^/]*$/, "");
  const step = location.protocol === "file:" ? "'" + folder.replaceAll("'", "'\\''") + "'" : "RUN --step N";
  const commands = charts.map(() => document.createElement("code"));
  const say = (a, b) => commands.forEach((command, index) => {
    const ms = (part) => Number(((part * charts[index].dataset.ns) / 1e6).toFixed(3));
    command.parentElement.hidden = a <= 0 && b >= 1;
    command.textContent = `stepscope merge ${step} --from ${ms(a)} --to ${ms(b)} --output part.json.gz`;
  });

  let drag = null;
  for (const chart of charts) {
    const hint = document.createElement("p");
    hint.className = "note drag";
    hint.textContent = "Drag to zoom, double-click to see all. Click a bar for a timeline of its time.";
    const line = document.createElement("span");
    line.hidden = true;
    line.append(" As a timeline: ", commands[charts.indexOf(chart)]);
    hint.append(line);
    chart.before(hint);
    const at = (event) => {
      const box = chart.querySelector(".track").getBoundingClientRect();
      return Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
    };
    chart.addEventListener("mousedown", (event) => {
      if (event.button) return;
      const select = document.createElement("div");
      select.className = "select";
      drag = { chart, at, start: at(event), select };
    });
    chart.addEventListener("dblclick", () => show(0, 1));
  }
  document.addEventListener("mousemove", (event) => {
    if (!drag) return;
    const end = drag.at(event), box = drag.chart.querySelector(".track");
    drag.chart.style.position = "relative";
    drag.chart.append(drag.select);
    drag.select.style.left = box.offsetLeft + Math.min(drag.start, end) * box.offsetWidth + "px";
    drag.select.style.width = Math.abs(end - drag.start) * box.offsetWidth + "px";
  });
  document.addEventListener("mouseup", (event) => {
    if (!drag) return;
    const [a, b] = [drag.start, drag.at(event)].sort((one, other) => one - other);
    drag.select.remove();
    drag = null;
    const wide = until - from;
    if ((b - a) * wide > 1e-6 && b - a > 0.005) show(from + a * wide, from + b * wide);
    else if (event.target.matches("i.m")) {
      const start = parseFloat(event.target.style.left) / 100;
      say(start, start + parseFloat(event.target.style.width) / 100);
    }
  });

  root.dataset.ready = document.querySelectorAll(".m").length;
})();
