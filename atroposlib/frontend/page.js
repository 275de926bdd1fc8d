"use strict";
(function () {
  var container = document.getElementById("groups-container");
  var groups = Array.from(container.querySelectorAll("details.group"));
  var search = document.getElementById("search");
  var order = document.getElementById("order");
  var toggle = document.getElementById("toggle");
  var active = null;
  var waiting = null;
  var texts = new Map();

  function visibleItems() {
    return Array.from(container.querySelectorAll(".item")).filter(function (item) {
      return !item.hidden && !item.parentElement.hidden;
    });
  }

  function activate(item) {
    if (active) { active.classList.remove("active"); }
    active = item;
    item.parentElement.open = true;
    item.classList.add("active");
    item.focus({ preventScroll: true });
    item.scrollIntoView({ block: "nearest" });
  }

  function move(step) {
    var items = visibleItems();
    if (!items.length) { return; }
    var at = items.indexOf(active);
    var next = at < 0 ? (step > 0 ? 0 : items.length - 1) : at + step;
    if (next >= 0 && next < items.length) { activate(items[next]); }
  }

  function textOf(item) {
    if (!texts.has(item)) { texts.set(item, item.textContent.toLowerCase()); }
    return texts.get(item);
  }

  function filter() {
    var wanted = search.value.trim().toLowerCase();
    groups.forEach(function (group) {
      var shown = 0;
      group.querySelectorAll(".item").forEach(function (item) {
        item.hidden = wanted !== "" && textOf(item).indexOf(wanted) < 0;
        if (!item.hidden) { shown += 1; }
      });
      group.hidden = shown === 0;
      if (wanted !== "" && shown > 0) { group.open = true; }
    });
    count();
  }

  function count() {
    var shown = groups.filter(function (group) { return !group.hidden; }).length;
    document.getElementById("count").textContent =
      shown + " of " + groups.length + " groups, " +
      visibleItems().length + " of " + container.querySelectorAll(".item").length + " rollouts";
  }

  function number(group, name, missing) {
    var text = group.dataset[name].replace("inf", "Infinity");
    return text === "" || text === "nan" ? missing : Number(text);
  }

  var comparisons = {
    differs: function (a, b) { return number(b, "differs", 0) - number(a, "differs", 0); },
    file: function (a, b) { return number(a, "index", 0) - number(b, "index", 0); },
    best: function (a, b) { return number(b, "best", -Infinity) - number(a, "best", -Infinity); },
    worst: function (a, b) { return number(a, "best", Infinity) - number(b, "best", Infinity); },
    mean: function (a, b) { return number(b, "mean", -Infinity) - number(a, "mean", -Infinity); }
  };

  function sort() {
    var name = order.value;
    groups.slice().sort(comparisons.file).sort(function (a, b) {
      return comparisons[name](a, b) || comparisons.file(a, b);
    }).forEach(function (group) { container.appendChild(group); });
  }

  function chip(score) {
    var made = document.createElement("span");
    made.className = "score" + (score > 0 ? " high" : score < 0 ? " low" : "");
    made.textContent = score;
    return made;
  }

  groups.forEach(function (group) {
    var scores = [];
    group.querySelectorAll(".item").forEach(function (item) {
      if (item.dataset.score === "") { return; }
      scores.push(item.dataset.score);
      item.querySelector("h3").dataset.score = "reward " + item.dataset.score;
    });
    if (!scores.length) { return; }
    var row = document.createElement("span");
    row.className = "scores";
    row.setAttribute("role", "group");
    row.setAttribute("aria-label", "rewards");
    scores.slice(0, 16).forEach(function (score) { row.append(chip(score), " "); });
    if (scores.length > 16) { row.append("+" + (scores.length - 16)); }
    group.firstElementChild.append(" ", row);
  });

  // Headings inside of a message are text of the message, not parts of the page.
  container.addEventListener("toggle", function (event) {
    var group = event.target;
    if (!group.matches("details.group")) { return; }
    group.querySelectorAll(".content-block :is(h1, h2, h3, h4, h5, h6)").forEach(function (found) {
      found.setAttribute("role", "presentation");
    });
    group.querySelectorAll(".item").forEach(function (item) {
      var heading = item.querySelector("h3");
      heading.setAttribute("aria-level", "2");
      heading.id = item.id + "-name";
      item.setAttribute("role", "article");
      item.setAttribute("aria-labelledby", heading.id);
    });
    group.querySelectorAll(".content-block :is(table, pre)").forEach(function (found) {
      if (found.scrollWidth > found.clientWidth) { found.tabIndex = 0; }
    });
  }, true);

  container.addEventListener("click", function (event) {
    var item = event.target.closest(".item");
    if (item && !event.target.closest("a")) { activate(item); }
  });
  container.addEventListener("focusin", function (event) {
    var item = event.target.closest(".item");
    if (item && item !== active) { activate(item); }
  });
  document.addEventListener("keydown", function (event) {
    var step = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) { return; }
    if (event.target === search || event.target === order) {
      if (event.key === "Escape") { event.target.blur(); }
      return;
    }
    if (event.key === "/") {
      event.preventDefault();
      search.focus();
      search.select();
    } else if (step) {
      event.preventDefault();
      move(step);
    }
  });
  search.addEventListener("input", function () {
    clearTimeout(waiting);
    waiting = setTimeout(filter, 120);
  });
  order.addEventListener("change", sort);
  toggle.addEventListener("click", function () {
    var open = groups.some(function (group) { return !group.open; });
    groups.forEach(function (group) { group.open = open; });
    toggle.textContent = open ? "Close all" : "Open all";
  });
  count();
}());
