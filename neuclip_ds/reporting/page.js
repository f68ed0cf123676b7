// Select and copy the table below a button: spreadsheets, documents and GitHub paste it as a table.
// execCommand works where a page comes from a file or over plain http, and navigator.clipboard does not.
document.addEventListener("click", (event) => {
  if (!event.target.matches("button.copy")) return;
  getSelection().selectAllChildren(event.target.closest("section").querySelector("table"));
  const done = document.execCommand("copy");
  event.target.textContent = done ? "Copied" : "Press Ctrl-C";
});
