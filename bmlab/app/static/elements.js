// What every widget of this chapter, and the server's page, draws with.

function make(tag, names, text) {
  const e = document.createElement(tag);
  if (names) e.className = names;
  if (text !== undefined) e.textContent = text;                    // text, never HTML
  return e;
}

// puts a text into the clipboard; where that is forbidden, the element is selected instead, and the answer is false
async function copied(text, element) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(element);
    return false;
  }
}

// the same for a "copy" button, which says for a moment how it went
async function copyBy(button, text, element, otherwise) {
  button.textContent = await copied(text, element) ? "copied" : otherwise;
  setTimeout(() => { button.textContent = "copy" }, 1500);
}
