// A heat map of one figure on a canvas, with a row for each replica and a column for each frame.

const ROW_PX = 10;
const MIN_PX = 24;
const MAX_PX = 640;

export class HeatMap {
  // `says` is called with the replica, time and formatted value under the pointer.
  constructor(canvas, says) {
    this.canvas = canvas;
    this.says = says;
    canvas.addEventListener("pointermove", (event) => this.point(event));
  }

  // Draw the figure `name` of the frames. Colours go from pale to full between `ends`, which are extended to fit the data.
  draw(frames, { name, title, shown, ends }) {
    const replicas = [...new Set(frames.flatMap((frame) => frame.replicas))];
    const rowOf = new Map(replicas.map((replica, row) => [replica, row]));
    const rows = replicas.map(() => new Array(frames.length).fill(null));
    let [low, high] = ends;
    frames.forEach((frame, at) => {
      const figure = frame.figures.indexOf(name);
      frame.values.forEach((values, number) => {
        rows[rowOf.get(frame.replicas[number])][at] = values[figure];
        if (values[figure] === null) return;
        if (values[figure] < low) low = values[figure];
        if (values[figure] > high) high = values[figure];
      });
    });
    Object.assign(this, { frames, replicas, rows, shown });
    this.paint((value) => (value - low) / (high - low || 1));
    this.canvas.setAttribute("aria-label", `${title} of ${replicas.length} replicas over the last 15 minutes`);
  }

  // Paint one pixel per value; the style sheet stretches the canvas.
  paint(share) {
    const { canvas, rows } = this;
    canvas.width = this.frames.length || 1;
    canvas.height = rows.length || 1;
    canvas.style.height = `${Math.min(MAX_PX, Math.max(MIN_PX, ROW_PX * rows.length))}px`;
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    const colour = matchMedia("(prefers-color-scheme: dark)").matches ? [122, 169, 216] : [58, 110, 165];
    rows.forEach((row, y) => row.forEach((value, x) => {
      if (value !== null) image.data.set([...colour, 25 + 230 * Math.min(Math.max(share(value), 0), 1)], 4 * (y * canvas.width + x));
    }));
    context.putImageData(image, 0, 0);
  }

  point(event) {
    if (!this.frames) return;
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * this.rows.length);
    const at = Math.floor(((event.clientX - box.left) / box.width) * this.frames.length);
    if (!this.replicas[row] || !this.frames[at]) return;
    const value = this.rows[row][at];
    this.says(this.replicas[row], this.frames[at].unix_s, value === null ? "unknown" : this.shown(value));
  }
}
