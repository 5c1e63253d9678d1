(function () {
  "use strict";
  var all = function (query) { return Array.prototype.slice.call(document.querySelectorAll(query)); };
  var select = document.getElementById("rollout");
  if (select) {
    var show = function () {
      all(".rollout").forEach(function (node) { node.hidden = node.dataset.rollout !== select.value; });
    };
    select.addEventListener("change", show);
    show();
  }
  var pairs = all(".pair"), search = document.getElementById("search"), more = document.getElementById("more");
  if (!pairs.length) return;
  var texts = pairs.map(function (node) { return node.textContent.toLowerCase(); });
  var filter = "", limit = 6;
  function update() {
    var words = search.value.toLowerCase().split(/\s+/).filter(Boolean), wanted = filter.split(" "), found = 0;
    pairs.forEach(function (node, i) {
      var kind = node.dataset.kind.split(" ");
      var fits = !filter || wanted.every(function (w, k) { return w === "*" || w === kind[k]; });
      fits = fits && words.every(function (word) { return texts[i].indexOf(word) >= 0; });
      if (fits) found += 1;
      node.hidden = !fits || found > limit;
    });
    var shown = Math.min(found, limit);
    document.getElementById("count").textContent = found ? "showing " + shown + " of " + found + " contexts" : "no context fits";
    more.hidden = shown === found;
    more.textContent = "show all " + found;
  }
  all("[data-filter]").forEach(function (button) {
    button.addEventListener("click", function () {
      all("[data-filter]").forEach(function (other) { other.setAttribute("aria-pressed", String(other === button)); });
      filter = button.dataset.filter;
      limit = 6;
      update();
    });
  });
  search.addEventListener("input", update);
  more.addEventListener("click", function () { limit = Infinity; update(); });
  update();
})();
