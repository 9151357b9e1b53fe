// A table that is wider than the page scrolls sideways; this lets the keyboard reach it. Each row of buttons at a program
// is a landmark, which needs a name of its own.
const reach = () => {
  document.querySelectorAll(".md-typeset__scrollwrap").forEach((each) => { each.tabIndex = 0; });
  document.querySelectorAll("nav.md-code__nav").forEach((each, index) => {
    each.setAttribute("aria-label", `program ${index + 1}`);
  });
};
new MutationObserver(reach).observe(document.documentElement, { childList: true, subtree: true });
reach();
