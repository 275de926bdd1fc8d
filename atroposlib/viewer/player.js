"use strict";
/* Replays the output of a terminal in elements `.v-player`, whose `data-cast` is a JSON list of
   [seconds, text]. The text is untrusted: it is interpreted as cells of text with colors, and shown
   by `textContent` only. Escape sequences that do other things are skipped. */
(function () {
  var COLUMNS = 100, ROWS = 24, MAX_LINES = 2000, MAX_IDLE_S = 2, TICK_MS = 50;
  var SPEEDS = [0.5, 1, 2, 4, 8];

  function Screen() {
    this.lines = [[]];
    this.row = 0;
    this.column = 0;
    this.style = {};
    this.pending = "";
  }

  Screen.prototype.write = function (text) {
    var data = this.pending + text;
    var at = 0;
    this.pending = "";
    while (at < data.length) {
      var c = data[at];
      if (c === "\u001b") {
        var length = this.escape(data.slice(at, at + 4096));
        if (length === 0 && data.length - at < 4096) { this.pending = data.slice(at); return; }
        at += Math.max(1, length);
        continue;
      }
      if (c === "\n") { this.lineFeed(); }
      else if (c === "\r") { this.column = 0; }
      else if (c === "\b") { this.column = Math.max(0, this.column - 1); }
      else if (c === "\t") { this.column = Math.min(COLUMNS - 1, (this.column >> 3) * 8 + 8); }
      else if (c >= " " && c !== "\u007f") {
        var point = String.fromCodePoint(data.codePointAt(at));
        this.put(/[\p{Cc}\p{Cf}\p{Cs}\u2028\u2029]/u.test(point) ? "\ufffd" : point);
        at += point.length;
        continue;
      }
      at += 1;
    }
  };

  Screen.prototype.put = function (character) {
    if (this.column >= COLUMNS) { this.column = 0; this.lineFeed(); }
    var line = this.lines[this.row];
    while (line.length < this.column) { line.push({ text: " ", style: {} }); }
    line[this.column] = { text: character, style: this.style };
    this.column += 1;
  };

  Screen.prototype.lineFeed = function () {
    this.row += 1;
    if (this.row >= this.lines.length) { this.lines.push([]); }
    if (this.lines.length > MAX_LINES) { this.lines.shift(); this.row -= 1; }
  };

  Screen.prototype.top = function () { return Math.max(0, this.lines.length - ROWS); };

  /* Returns the length of the sequence, 0 while it is incomplete. */
  Screen.prototype.escape = function (data) {
    var found = /^\u001b\[([0-?]*)[ -/]*([@-~])/.exec(data);
    if (found) { this.control(found[1], found[2]); return found[0].length; }
    if (/^\u001b(\[[0-?]*[ -/]*)?$/.test(data)) { return 0; }
    found = /^\u001b[\]PX^_][^\u0007\u001b]*(\u0007|\u001b\\)/.exec(data);
    if (found) { return found[0].length; }
    if (/^\u001b[\]PX^_][^\u0007\u001b]*\u001b?$/.test(data)) { return 0; }
    found = /^\u001b[ -/]*[0-~]/.exec(data);
    return found ? found[0].length : 1;
  };

  Screen.prototype.control = function (text, name) {
    // Private sequences do other things: `>4;1m` reports keys, and does not turn text bold.
    if (/^[<=>?]/.test(text)) { return; }
    var numbers = text.split(";").map(function (part) { return parseInt(part, 10) || 0; });
    var count = Math.min(Math.max(1, numbers[0]), MAX_LINES);
    if (name === "m") { this.color(numbers); }
    else if (name === "A") { this.row = Math.max(this.top(), this.row - count); }
    else if (name === "B") { this.row = Math.min(this.lines.length - 1, this.row + count); }
    else if (name === "C") { this.column = Math.min(COLUMNS - 1, this.column + count); }
    else if (name === "D") { this.column = Math.max(0, this.column - count); }
    else if (name === "G") { this.column = Math.min(COLUMNS, count) - 1; }
    else if (name === "H" || name === "f") { this.move(count - 1, Math.max(1, numbers[1] || 1) - 1); }
    else if (name === "K") { this.eraseLine(numbers[0]); }
    else if (name === "J" && numbers[0] >= 2) { this.lines = [[]]; this.row = 0; }
    else if (name === "J" && numbers[0] === 0) {
      this.lines.length = this.row + 1;
      this.eraseLine(0);
    }
  };

  Screen.prototype.move = function (row, column) {
    var wanted = this.top() + Math.min(row, ROWS - 1);
    while (this.lines.length <= wanted) { this.lines.push([]); }
    this.row = wanted;
    this.column = Math.min(column, COLUMNS - 1);
  };

  Screen.prototype.eraseLine = function (how) {
    var line = this.lines[this.row];
    if (how === 0) { line.length = Math.min(line.length, this.column); return; }
    var stop = how === 1 ? Math.min(line.length, this.column + 1) : line.length;
    for (var i = 0; i < stop; i += 1) { line[i] = { text: " ", style: {} }; }
  };

  Screen.prototype.color = function (numbers) {
    var style = Object.assign({}, this.style);
    for (var i = 0; i < numbers.length; i += 1) {
      var n = numbers[i];
      if (n === 0) { style = {}; }
      else if (n === 1) { style.bold = true; }
      else if (n === 22) { delete style.bold; }
      else if (n >= 30 && n <= 37) { style.fore = n - 30; }
      else if (n >= 90 && n <= 97) { style.fore = n - 82; }
      else if (n === 39) { delete style.fore; }
      else if (n >= 40 && n <= 47) { style.back = n - 40; }
      else if (n >= 100 && n <= 107) { style.back = n - 92; }
      else if (n === 49) { delete style.back; }
      else if (n === 38 || n === 48) {
        var key = n === 38 ? "fore" : "back";
        if (numbers[i + 1] === 5) {
          if (numbers[i + 2] < 16) { style[key] = numbers[i + 2]; } else { delete style[key]; }
          i += 2;
        } else if (numbers[i + 1] === 2) { delete style[key]; i += 4; }
      }
    }
    this.style = style;
  };

  function classOf(style) {
    var names = [];
    if (style.bold) { names.push("v-bold"); }
    if (style.fore !== undefined) { names.push("v-f" + style.fore); }
    if (style.back !== undefined) { names.push("v-b" + style.back); }
    return names.join(" ");
  }

  function show(screen, box) {
    var shown = document.createDocumentFragment();
    screen.lines.slice(-Math.max(ROWS, 200)).forEach(function (line) {
      var row = document.createElement("div");
      for (var i = 0; i < line.length;) {
        var name = classOf(line[i].style), text = "";
        while (i < line.length && classOf(line[i].style) === name) { text += line[i].text; i += 1; }
        var span = document.createElement("span");
        span.className = name;
        span.textContent = text;
        row.appendChild(span);
      }
      if (!line.length) { row.textContent = "\u00a0"; }
      shown.appendChild(row);
    });
    box.replaceChildren(shown);
    box.scrollTop = box.scrollHeight;
  }

  /* Times at which pieces are shown, with long pauses shortened. */
  function timesOf(pieces) {
    var now = 0, before = 0;
    return pieces.map(function (piece) {
      now += Math.min(MAX_IDLE_S, Math.max(0, piece[0] - before));
      before = piece[0];
      return now;
    });
  }

  function element(tag, name, text) {
    var made = document.createElement(tag);
    made.className = name;
    if (text) { made.textContent = text; }
    return made;
  }

  function Player(root) {
    var pieces = [];
    try { pieces = JSON.parse(root.dataset.cast); } catch (error) { pieces = []; }
    this.pieces = pieces.filter(function (piece) {
      return Array.isArray(piece) && typeof piece[0] === "number" && typeof piece[1] === "string";
    });
    this.times = timesOf(this.pieces);
    this.length = this.times.length ? this.times[this.times.length - 1] : 0;
    this.root = root;
    this.build(root);
    this.seek(this.length);
  }

  Player.prototype.build = function (root) {
    var self = this;
    this.box = element("div", "v-terminal");
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "log");
    this.box.setAttribute("aria-label", "output of the agent");
    this.play = element("button", "v-play", "play");
    this.bar = element("input", "v-seek");
    this.bar.type = "range";
    this.bar.min = "0";
    this.bar.max = "1000";
    this.bar.setAttribute("aria-label", "time of the replay");
    this.clock = element("span", "v-clock");
    this.speed = element("select", "v-speed");
    this.speed.setAttribute("aria-label", "speed of the replay");
    SPEEDS.forEach(function (speed) {
      var option = element("option", "", speed + "×");
      option.value = String(speed);
      option.selected = speed === 1;
      self.speed.appendChild(option);
    });
    this.play.addEventListener("click", function () { self.toggle(); });
    this.bar.addEventListener("input", function () {
      self.stop();
      self.seek(self.length * Number(self.bar.value) / 1000);
    });
    var controls = element("div", "v-controls");
    [this.play, this.bar, this.clock, this.speed].forEach(function (part) {
      controls.appendChild(part);
    });
    root.replaceChildren(this.box, controls);
  };

  Player.prototype.seek = function (time) {
    if (this.screen === undefined || time < this.now) {
      this.screen = new Screen();
      this.next = 0;
    }
    var before = this.next;
    while (this.next < this.pieces.length && this.times[this.next] <= time) {
      this.screen.write(this.pieces[this.next][1]);
      this.next += 1;
    }
    if (before !== this.next || this.now === undefined || time < this.now) {
      show(this.screen, this.box);
    }
    this.now = time;
    this.bar.value = String(this.length ? 1000 * time / this.length : 1000);
    this.bar.setAttribute("aria-valuetext", time.toFixed(1) + " s");
    this.clock.textContent = time.toFixed(1) + " / " + this.length.toFixed(1) + " s";
  };

  Player.prototype.toggle = function () {
    if (this.timer) { this.stop(); return; }
    if (this.now >= this.length) { this.seek(0); }
    var self = this, before = performance.now();
    this.play.textContent = "pause";
    this.timer = setInterval(function () {
      var now = performance.now();
      var time = self.now + (now - before) / 1000 * Number(self.speed.value);
      before = now;
      if (!self.root.isConnected) { self.stop(); return; }
      self.seek(Math.min(time, self.length));
      if (self.now >= self.length) { self.stop(); }
    }, TICK_MS);
  };

  Player.prototype.stop = function () {
    clearInterval(this.timer);
    this.timer = 0;
    this.play.textContent = "play";
  };

  document.addEventListener("toggle", function (event) {
    var root = event.target.open && event.target.querySelector
      ? event.target.querySelector(":scope > .v-player") : null;
    if (root && !root.firstChild) { new Player(root); }
  }, true);
}());
