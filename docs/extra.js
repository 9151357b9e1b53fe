// A table that is wider than the page scrolls sideways; this lets the keyboard reach it. Each row of buttons at a program
// is a landmark, which needs a name of its own, and so does the path above the title, which the theme calls as the menu.
const reach = () => {
  document.querySelectorAll(".md-typeset__scrollwrap").forEach((each) => { each.tabIndex = 0; });
  document.querySelectorAll("nav.md-code__nav").forEach((each, index) => {
    each.setAttribute("aria-label", `program ${index + 1}`);
  });
  document.querySelectorAll("nav.md-path").forEach((each) => { each.setAttribute("aria-label", "Path"); });
};
new MutationObserver(reach).observe(document.documentElement, { childList: true, subtree: true });
reach();
