// A table that is wider than the page scrolls sideways; this lets the keyboard reach it.
const reach = () => document.querySelectorAll(".md-typeset__scrollwrap").forEach((each) => { each.tabIndex = 0; });
new MutationObserver(reach).observe(document.documentElement, { childList: true, subtree: true });
reach();
