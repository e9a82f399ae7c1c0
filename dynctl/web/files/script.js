// Newer data every two seconds, sorting without a new page, and explanations in a dialog.
// The page works without this file.
"use strict";
(() => {
  const EVERY_MS = 2000;
  const live = document.getElementById("live");
  const pause = document.getElementById("pause");
  const dialog = document.getElementById("explain");
  const explained = document.getElementById("explained");
  let timer = 0;
  let paused = false;
  let turn = 0;

  const say = (text, kind) => {
    if (live.textContent !== text) live.textContent = text;
    live.className = `live ${kind}`;
  };

  const read = async (address) => {
    const answer = await fetch(address, { credentials: "same-origin", signal: AbortSignal.timeout(8000) });
    const found = new DOMParser().parseFromString(await answer.text(), "text/html");
    return { ok: answer.ok, status: answer.status, found };
  };

  // Replaces the parts that changed; the part with the focus gets it back.
  const show = (found) => {
    for (const part of document.querySelectorAll("[data-live]")) {
      const next = found.querySelector(`[data-live="${part.dataset.live}"]`);
      if (!next || next.outerHTML === part.outerHTML) continue;
      const focused = part.contains(document.activeElement) ? document.activeElement.id : "";
      part.replaceWith(next);
      if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    }
  };

  const update = async () => {
    clearTimeout(timer);
    const mine = ++turn;
    try {
      const { ok, status, found } = await read(location.pathname + location.search);
      if (mine !== turn) return;
      if (status === 401 || status === 403) return location.reload();
      if (ok) show(found);
      say(ok ? "live" : `not current: the frontend answers ${status}`, ok ? "on" : "late");
    } catch {
      if (mine === turn) say("not current: the frontend does not answer", "late");
    }
    if (!paused && !document.hidden && mine === turn) timer = setTimeout(update, EVERY_MS);
  };

  const open = async (address) => {
    explained.replaceChildren();
    explained.setAttribute("aria-busy", "true");
    if (!dialog.open) dialog.showModal();
    try {
      const { found } = await read(address);
      explained.replaceChildren(found.querySelector("#text, main") ?? "No explanation.");
    } catch {
      explained.replaceChildren("The frontend does not answer.");
    }
    explained.removeAttribute("aria-busy");
  };

  document.addEventListener("click", (event) => {
    if (event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    const link = event.target.closest("a");
    if (link && (link.matches("[data-open]") || explained.contains(link))) {
      event.preventDefault();
      open(link.href);
    } else if (link && link.matches("[data-view]")) {
      event.preventDefault();
      const address = new URL(link.href);
      history.replaceState(null, "", address.pathname + address.search);
      update();
    }
  });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Continue" : "Pause";
    if (paused) { clearTimeout(timer); turn++; say("paused", ""); } else update();
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden && !paused) update(); });
  document.addEventListener("formdata", (event) => {
    const query = new URLSearchParams(location.search);
    if (event.target.matches("[role=search]"))
      for (const name of ["sort", "desc", "domain"]) if (query.get(name)) event.formData.set(name, query.get(name));
  });
  pause.hidden = false;
  say("live", "on");
  timer = setTimeout(update, EVERY_MS);
})();
