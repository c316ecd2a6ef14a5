"use strict";
(() => {
  const at = (id) => document.getElementById(id);
  const hues = new Map();
  let key = sessionStorage.getItem("psctl-key") || "";
  let drawing = null;
  let drawn = null;
  let isCascade = false;
  let numReferences = 0;
  let others = [];
  const brush = new Brush(at("picture"), at("mask"));

  const headers = (more = {}) => (key ? { ...more, Authorization: `Bearer ${key}` } : more);
  const seconds = (value) => (value === null || value === undefined ? "-" : value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`);
  const colour = (id, light) => {
    if (!hues.has(id)) hues.set(id, (hues.size * 137.5) % 360);
    if (hues.size > 500) hues.delete(hues.keys().next().value);
    return `hsl(${hues.get(id)} 65% ${light}%)`;
  };
  const element = (name, text, className) => {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));

  // EventSource cannot send a key, so streams are read by hand.
  async function* eventsOf(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
        const lines = text.slice(0, end).split("\n");
        text = text.slice(end + 2);
        const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (data) yield JSON.parse(data);
      }
    }
  }

  function showBatch(state) {
    const canvas = at("batch"), pen = canvas.getContext("2d"), style = getComputedStyle(document.body);
    canvas.width = canvas.clientWidth || 640;
    const active = [];
    for (const request of state.requests) {
      request.steps_done.forEach((done, index) => {
        if (done > 0 && done < request.num_inference_steps) active.push({ request, done, index });
      });
    }
    const scale = 8 * Math.max(1, ...state.requests.map((each) => Math.max(...each.size.split("x").map(Number)) / 256));
    const cell = 9, gap = 14;
    let x = 0, y = 0, row = 0;
    const places = active.map((each) => {
      const [width, height] = each.request.size.split("x").map((side) => Math.max(1, Math.round(Number(side) / (4 * scale))));
      if (x + width * cell > canvas.width) { x = 0; y += row + gap; row = 0; }
      const place = { ...each, width, height, x, y };
      x += width * cell + gap;
      row = Math.max(row, height * cell);
      return place;
    });
    canvas.height = Math.max(60, y + row + 2);
    pen.clearRect(0, 0, canvas.width, canvas.height);
    const ran = state.batch ? { ...state.batch.computed } : {};
    // The last step is that of one replica; with several, its images are unknown.
    const isKnown = state.batch && state.replicas.length < 2;
    for (const place of places) {
      const name = `${place.request.id}-${place.index}`, count = place.width * place.height;
      const isComputed = !isKnown || (ran[place.request.size] || 0) > 0;
      if (isComputed) ran[place.request.size] -= 1;
      const filled = Math.round((count * place.done) / place.request.num_inference_steps);
      for (let each = 0; each < count; each += 1) {
        const left = place.x + (each % place.width) * cell, top = place.y + Math.floor(each / place.width) * cell;
        pen.fillStyle = colour(name, each < filled ? 52 : 84);
        pen.fillRect(left, top, cell - 1, cell - 1);
        if (!isComputed) {
          pen.strokeStyle = style.color;
          pen.globalAlpha = 0.35;
          pen.beginPath();
          pen.moveTo(left, top + cell - 1);
          pen.lineTo(left + cell - 1, top);
          pen.stroke();
          pen.globalAlpha = 1;
        }
      }
    }
    at("step").textContent = state.batch
      ? `step ${state.batch.step}: ${places.length} images, ${seconds(state.batch.duration_s)}; hatched: reused`
      : "nothing is being drawn";
  }

  function showQueue(state) {
    const list = at("queue");
    list.replaceChildren();
    for (const request of state.requests) {
      const line = element("li");
      const all = request.num_inference_steps * request.steps_done.length;
      const done = request.steps_done.reduce((sum, each) => sum + each, 0);
      const bar = element("div", undefined, "bar"), part = element("i");
      part.style.width = `${(100 * done) / all}%`;
      part.style.background = colour(`${request.id}-0`, 52);
      bar.append(part);
      const slack = request.slack_s;
      line.append(element("span", request.size), bar, element("span", slack === null ? seconds(request.waited_s) : slack < 0 ? "late" : `${seconds(slack)} left`, slack !== null && slack < 0 ? "late" : ""));
      list.append(line);
    }
    if (!state.requests.length) list.append(element("li", "empty"));
  }

  function showReplicas(state) {
    at("replicas-panel").hidden = state.replicas.length < 2 && !state.plan;
    at("plan").textContent = state.plan;
    const most = Math.max(1, ...state.replicas.map((each) => each.pixel_steps));
    at("replicas").replaceChildren(...state.replicas.map((each) => {
      const line = element("li"), bar = element("div", undefined, "bar"), part = element("i");
      part.style.width = `${(100 * each.pixel_steps) / most}%`;
      part.style.background = colour(each.name, 52);
      bar.append(part);
      line.append(element("span", each.name), bar, element("span", `${each.health}, ${each.running} running`));
      return line;
    }));
  }

  function showAttainment(state) {
    const list = at("attainment");
    list.replaceChildren();
    for (const [window, found] of Object.entries(state.attainment)) {
      const box = element("div");
      box.append(element("dt", `${window / 60} min`), element("dd", found.share === null ? "-" : `${Math.round(100 * found.share)} %`), element("dt", `${found.n} images`));
      list.append(box);
    }
  }

  function showLatencies(state) {
    const canvas = at("latency"), pen = canvas.getContext("2d"), ink = getComputedStyle(document.body).color;
    const sizes = Object.entries(state.latencies);
    canvas.width = canvas.clientWidth || 640;
    // A distant SLO must not compress all latencies into one bar.
    const longest = Math.max(0.1, ...sizes.flatMap(([, each]) => each.latencies_s));
    const most = Math.max(longest, ...sizes.map(([, each]) => Math.min(each.slo_s || 0, 3 * longest))) * 1.05;
    const bins = 40, left = 76, rowHeight = 46;
    canvas.height = Math.max(60, sizes.length * rowHeight + 18);
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.font = "12px system-ui";
    sizes.forEach(([size, found], index) => {
      const counts = new Array(bins).fill(0);
      for (const value of found.latencies_s) counts[Math.min(bins - 1, Math.floor((value / most) * bins))] += 1;
      const top = index * rowHeight + 4, base = top + rowHeight - 10, width = (canvas.width - left) / bins, high = Math.max(...counts);
      pen.fillStyle = ink;
      pen.fillText(size, 0, base - 4);
      counts.forEach((count, bin) => {
        const height = ((base - top) * count) / high;
        const isLate = found.slo_s !== null && ((bin + 0.5) / bins) * most > found.slo_s;
        pen.fillStyle = isLate ? "#d1495b" : "#2f6fde";
        pen.fillRect(left + bin * width, base - height, width - 1, height);
      });
      if (found.slo_s !== null && found.slo_s <= most) {
        pen.fillStyle = ink;
        pen.fillRect(left + (found.slo_s / most) * (canvas.width - left), top, 1, base - top);
      }
    });
    pen.fillStyle = ink;
    pen.fillText(`0 to ${seconds(most)}; line: SLO`, left, canvas.height - 4);
  }

  const shown = new Map();
  async function showImages(state) {
    const box = at("recent"), wanted = new Set();
    for (const image of state.images) {
      const name = `${image.id}-${image.image_index}`;
      wanted.add(name);
      if (shown.has(name)) continue;
      const button = element("button");
      const picture = element("img");
      picture.src = `v1/images/${encodeURIComponent(name)}/content`;
      picture.alt = `an image of ${image.size}`;
      button.type = "button";
      button.title = "use its seed and size";
      button.append(picture, element("span", `${image.size}, ${seconds(image.latency_s)}${image.slo_met === false ? ", late" : ""}`));
      button.addEventListener("click", () => { at("seed").value = image.seed; at("size").value = image.size; at("prompt").focus(); });
      shown.set(name, button);
    }
    for (const [name, button] of shown) if (!wanted.has(name)) { button.remove(); shown.delete(name); }
    state.images.forEach((image, index) => {
      const button = shown.get(`${image.id}-${image.image_index}`);
      if (box.children[index] !== button) box.insertBefore(button, box.children[index] || null);
    });
  }

  function show(state) {
    at("model").textContent = state.model;
    at("status").textContent = state.status;
    at("status").className = `badge ${state.status === "ready" ? "ready" : "bad"}`;
    at("load").textContent = `${state.load.running} running, ${state.load.waiting} waiting, all done in ${seconds(state.load.drain_s)}`;
    showBatch(state);
    showQueue(state);
    showReplicas(state);
    showAttainment(state);
    showLatencies(state);
    showImages(state);
  }

  async function follow() {
    for (;;) {
      try {
        const response = await fetch("v1/state/stream", { headers: headers() });
        at("key-line").hidden = response.status !== 401;
        if (response.ok) for await (const state of eventsOf(response)) show(state);
        else at("status").textContent = response.status === 401 ? "needs a key" : `error ${response.status}`;
      } catch (error) {
        at("status").textContent = "not reachable";
      }
      at("status").className = "badge bad";
      await pause(2000);
    }
  }

  async function loadDefaults() {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) return;
    const card = (await response.json()).data[0];
    at("size").replaceChildren(...card.sizes.map((size) => element("option", size)));
    at("size").value = card.defaults.size;
    at("steps").value = card.defaults.num_inference_steps;
    at("steps").max = card.limits.num_inference_steps;
    // Each model of a cascade takes its own steps, and a cascade has no partial images.
    isCascade = Boolean(card.cascade);
    at("steps").disabled = isCascade;
    for (const name of ["file-line", "edit-drawn"]) at(name).hidden = isCascade;
    numReferences = card.limits.references;
    at("file").multiple = numReferences > 1;
    at("unpainted").hidden = !numReferences;
  }

  // The first image is edited; a model that takes references sees the others beside it.
  async function startEdit(file, ...further) {
    try {
      await brush.load(file);
    } catch (error) {
      at("told").textContent = "this file is no image that the browser knows";
      return;
    }
    at("edit").hidden = false;
    at("go").textContent = "Edit";
    others = further;
    at("others").hidden = !others.length;
    at("others").textContent = `Beside it: ${others.map((other) => other.name).join(", ")}`;
    at("size").disabled = !numReferences;
    at("told").textContent = "";
  }

  function endEdit() {
    brush.close();
    at("edit").hidden = true;
    at("file").value = "";
    at("go").textContent = "Draw";
    at("size").disabled = false;
  }

  // The URL and options of a request: JSON for a new image, or the form of an edit.
  async function requestOf(body) {
    if (!brush.image) {
      const options = { headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify({ ...body, size: at("size").value }) };
      return ["v1/images/generations", options];
    }
    const form = new FormData(), isMasked = brush.isPainted || !numReferences;
    const own = isMasked ? { strength: Number(at("strength").value) } : { size: at("size").value };
    for (const [name, value] of Object.entries({ ...body, ...own })) form.append(name, String(value));
    for (const image of [brush.image, ...others]) form.append("image[]", image, "image");
    if (isMasked) form.append("mask", await brush.maskFile(), "mask.png");
    return ["v1/images/edits", { headers: headers(), body: form }];
  }

  async function draw(submitted) {
    submitted.preventDefault();
    const body = { prompt: at("prompt").value, stream: true, progress: true };
    if (!isCascade) body.partial_images = 3;
    if (!isCascade && at("steps").value) body.num_inference_steps = Number(at("steps").value);
    if (at("seed").value) body.seed = Number(at("seed").value);
    at("go").disabled = true;
    at("stop").disabled = false;
    at("told").textContent = "waiting";
    at("edit-drawn").disabled = true;
    drawing = new AbortController();
    const started = performance.now();
    try {
      const [address, asked] = await requestOf(body);
      const response = await fetch(address, { ...asked, method: "POST", signal: drawing.signal });
      if (!response.ok) {
        at("told").textContent = (await response.json()).error.message;
        return;
      }
      for await (const event of eventsOf(response)) {
        if (event.error) { at("told").textContent = event.error.message; continue; }
        if (event.b64_json) {
          at("drawn").hidden = false;
          at("image").src = `data:image/${event.output_format};base64,${event.b64_json}`;
          at("image").alt = body.prompt;
          at("caption").textContent = body.prompt;
        }
        if (event.type.endsWith(".progress")) at("told").textContent = isCascade ? `step ${event.steps_done}` : `step ${event.steps_done} of ${event.num_inference_steps}`;
        if (event.type.endsWith(".partial_image")) at("image").dataset.partial = event.partial_image_index;
        if (event.type.endsWith(".completed")) {
          at("image").dataset.partial = "final";
          at("edit-drawn").disabled = false;
          drawn = new Blob([Uint8Array.from(atob(event.b64_json), (letter) => letter.charCodeAt(0))]);
          at("told").textContent = `done in ${seconds((performance.now() - started) / 1000)}, seed ${event.seed}${event.model ? `, by ${event.model}` : ""}`;
        }
      }
    } catch (error) {
      at("told").textContent = error.name === "AbortError" ? "cancelled" : "the connection was lost";
    } finally {
      at("go").disabled = false;
      at("stop").disabled = true;
    }
  }

  at("draw").addEventListener("submit", draw);
  at("stop").addEventListener("click", () => drawing && drawing.abort());
  at("file").addEventListener("change", () => { const { files } = at("file"); if (files.length) startEdit(...files); });
  at("edit-drawn").addEventListener("click", () => startEdit(drawn));
  at("no-edit").addEventListener("click", endEdit);
  at("clear").addEventListener("click", () => brush.clear());
  at("width").addEventListener("input", () => { brush.width_px = Number(at("width").value); });
  at("erase").addEventListener("change", () => { brush.erases = at("erase").checked; });
  at("use-key").addEventListener("click", () => { key = at("key").value; sessionStorage.setItem("psctl-key", key); learn(); });
  loadDefaults().catch(() => {});
  follow();
})();
