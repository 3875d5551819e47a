// What is wrong with the layout of a page, by kind of fault. Texts that are folded (`details`) or left
// out at this width (`display: none`) are not looked at.
() => {
  const near = 1;  // px: fractions of a pixel are rounded
  const all = selector => [...document.querySelectorAll(selector)];
  const name = element => {
    const text = element.textContent.trim().slice(0, 40);
    return `<${element.tagName.toLowerCase()} ${element.className}> ${text}`;
  };
  const isInside = (inner, outer) =>
    inner.left >= outer.left - near && inner.right <= outer.right + near;
  const isWhollyInside = (inner, outer) => isInside(inner, outer)
    && inner.top >= outer.top - near && inner.bottom <= outer.bottom + near;
  const page = { left: 0, right: innerWidth };

  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.data.trim() || !element.checkVisibility({ visibilityProperty: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    texts.push({ node, element, rects: [...range.getClientRects()] });
  }

  const clips = ({ element, rects }) => {
    for (let outer = element; outer; outer = outer.parentElement) {
      if (getComputedStyle(outer).overflowX === "visible") continue;
      const box = outer.getBoundingClientRect();
      if (rects.some(rect => !isWhollyInside(rect, box))) return true;
    }
    return false;
  };
  const leaves = ({ element, rects }) => {
    const card = element.closest("td, .panel, .tile, .answer, li, table, dl, details");
    const box = card ? card.getBoundingClientRect() : page;
    return rects.some(rect => !isInside(rect, box) || !isInside(rect, page));
  };
  const isWhole = "th, .label, .name, h1, h2, h3, .chart > span";
  const broken = ({ node, element }) => element.matches(isWhole)
    && [...node.data.matchAll(/[^\s-]+/g)].some(word => {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      return range.getClientRects().length > 1;
    });

  const overlaps = all(".chart").flatMap(chart => {
    const labels = [...chart.children].filter(child => child.tagName === "SPAN");
    const rects = labels.map(label => label.getBoundingClientRect());
    return labels.flatMap((label, i) => labels.slice(i + 1).flatMap((other, k) => {
      const a = rects[i], b = rects[i + 1 + k];
      const isBeside = a.right <= b.left || b.right <= a.left;
      const apart = isBeside || a.bottom <= b.top || b.bottom <= a.top;
      return apart ? [] : [`${label.textContent} and ${other.textContent}`];
    }));
  });

  const rgba = text => {
    const context = document.createElement("canvas").getContext("2d");
    context.fillStyle = text;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const luminance = text => {
    const linear = rgba(text).slice(0, 3).map(value => value / 255).map(
      value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const memo = new Map();
  const brightness = text => memo.get(text) ?? memo.set(text, luminance(text)).get(text);
  const faint = ({ element }) => {
    for (let behind = element; behind; behind = behind.parentElement) {
      const style = getComputedStyle(behind);
      if (style.backgroundImage !== "none") return false;
      const colour = style.backgroundColor;
      if (/^rgba\(.*, 0\)$/.test(colour)) continue;
      const [a, b] = [brightness(getComputedStyle(element).color), brightness(colour)];
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
    }
    return false;
  };

  const drawn = all("svg, table, [role=img], .panel, .tile, .bar")
    .filter(element => element.checkVisibility());
  const isHidden = element => {
    const box = element.getBoundingClientRect();
    return box.width < 2 || box.height < 2 || !isInside(box, page);
  };
  const named = found => found.map(({ element }) => name(element));
  const isBlank = ({ rects }) => !rects.some(rect => rect.width > 0 && rect.height > 0);
  return {
    // Without a font texts have no size, and no other fault would be found.
    without_letters: named(texts.filter(isBlank)),
    too_wide: document.documentElement.scrollWidth > innerWidth ? [`${innerWidth} px`] : [],
    hidden: drawn.filter(isHidden).map(name),
    clipped: named(texts.filter(clips)),
    outside_their_card: named(texts.filter(leaves)),
    broken_words: named(texts.filter(broken)),
    overlapping_labels: overlaps,
    faint: named(texts.filter(faint)),
  };
}
