(() => {
  "use strict";
  try {
    const wanted = localStorage.getItem("specbench-theme");
    if (wanted === "light" || wanted === "dark") document.documentElement.dataset.theme = wanted;
  } catch (error) {
    /* A page opened from disk may have no storage: the system's theme it is. */
  }
})();
