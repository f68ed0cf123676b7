// Replace the page's content by what the server has now, unless it is the same or text is being selected.
let shown = "";
setInterval(async () => {
  const note = document.getElementById("connection");
  try {
    const text = await (await fetch(location.href)).text();
    note.textContent = "";
    if (text === shown || !getSelection().isCollapsed) return;
    shown = text;
    const page = new DOMParser().parseFromString(text, "text/html");
    const open = [...document.querySelectorAll("details")].map((part) => part.open);
    document.title = page.title;
    document.body.innerHTML = page.body.innerHTML;
    document.querySelectorAll("details").forEach((part, number) => (part.open = open[number]));
  } catch {
    note.textContent = "neuclip-ds watch does not answer: this is the last state that it sent.";
  }
}, 5000);
