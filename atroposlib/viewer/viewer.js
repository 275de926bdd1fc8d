"use strict";
(function () {
  var tip = null;
  var keys = {
    j: "v-next-group", ArrowRight: "v-next-group", k: "v-previous-group",
    ArrowLeft: "v-previous-group", l: "v-next-rollout", h: "v-previous-rollout",
    n: "v-next-rows", p: "v-previous-rows"
  };

  function press(id) {
    var found = document.getElementById(id);
    if (found) { found.click(); }
  }

  // A narrow page keeps some of the tabs in a menu; a hidden list has the names of all, in order.
  function tabNames() {
    return Array.from(
      document.querySelectorAll("#v-tabs > .tab-wrapper > [aria-hidden=true] button"),
      function (button) { return button.textContent.trim(); });
  }

  function openTab(name) {
    Array.from(document.querySelectorAll(
      "#v-tabs button[role=tab], #v-tabs > .tab-wrapper .overflow-dropdown button"
    )).some(function (button) {
      var isWanted = button.textContent.trim() === name;
      if (isWanted) { button.click(); }
      return isWanted;
    });
  }

  function onClick(event) {
    var link = event.target.closest ? event.target.closest("[data-opens]") : null;
    if (link) { openTab(link.dataset.opens); }
  }

  function isTyping(target) {
    return target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName);
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) { return; }
    if (isTyping(event.target)) {
      if (event.key === "Escape") { event.target.blur(); }
      return;
    }
    if (event.key in keys) {
      if (event.target.getAttribute("role") === "tab") { event.target.blur(); }
      event.preventDefault();
      event.stopPropagation();
      press(keys[event.key]);
    } else if (/^[1-9]$/.test(event.key)) {
      openTab(tabNames()[event.key - 1]);
    } else if (event.key === "/") {
      event.preventDefault();
      press("v-tab-groups-button");
      setTimeout(function () {
        var box = document.querySelector("#v-search textarea, #v-search input");
        if (box) { box.focus(); box.select(); }
      }, 100);
    } else if ((event.key === "Enter" || event.key === " ") &&
        event.target.matches("tr[data-group], section[data-rollout]")) {
      event.preventDefault();
      event.target.click();
    }
  }

  function onPoint(event) {
    var token = event.target.closest ? event.target.closest("[data-t]") : null;
    if (!token) {
      if (tip) { tip.hidden = true; }
      return;
    }
    if (!tip) {
      tip = document.createElement("div");
      tip.id = "v-tip";
      tip.setAttribute("role", "tooltip");
      document.body.appendChild(tip);
    }
    tip.textContent = token.dataset.t;
    tip.hidden = false;
    var box = token.getBoundingClientRect();
    var width = tip.offsetWidth;
    var left = Math.min(Math.max(4, event.clientX - 20), window.innerWidth - width - 8);
    var above = box.top - tip.offsetHeight - 4;
    tip.style.left = left + "px";
    tip.style.top = (above > 4 ? above : box.bottom + 4) + "px";
  }

  document.addEventListener("keydown", onKey, true);
  document.addEventListener("click", onClick);
  document.addEventListener("mouseover", onPoint);
  document.addEventListener("scroll", function () { if (tip) { tip.hidden = true; } }, true);
}());
