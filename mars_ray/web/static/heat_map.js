// A heat map of one figure: a line for each replica, a column for each frame, on a canvas.

const ROW_PX = 10;
const LEAST_PX = 24;
const MOST_PX = 640;

export class HeatMap {
  // `says` is called with the replica, the time and the formatted value under the pointer.
  constructor(canvas, says) {
    this.canvas = canvas;
    this.says = says;
    canvas.addEventListener("pointermove", (event) => this.point(event));
  }

  // Draw `name` of the frames, from pale to full between `ends`, which grow with the data.
  draw(frames, { name, title, shown, ends }) {
    const replicas = [...new Set(frames.flatMap((frame) => frame.replicas))];
    const place = new Map(replicas.map((each, row) => [each, row]));
    const rows = replicas.map(() => new Array(frames.length).fill(null));
    let [low, most] = ends;
    frames.forEach((frame, at) => {
      const figure = frame.figures.indexOf(name);
      frame.values.forEach((values, number) => {
        rows[place.get(frame.replicas[number])][at] = values[figure];
        if (values[figure] === null) return;
        if (values[figure] < low) low = values[figure];
        if (values[figure] > most) most = values[figure];
      });
    });
    Object.assign(this, { frames, replicas, rows, shown });
    this.paint((value) => (value - low) / (most - low || 1));
    this.canvas.setAttribute("aria-label", `${title} of ${replicas.length} replicas over the last 15 minutes`);
  }

  // Paint one pixel for each value; the style sheet stretches the canvas.
  paint(share) {
    const { canvas, rows } = this;
    canvas.width = this.frames.length || 1;
    canvas.height = rows.length || 1;
    canvas.style.height = `${Math.min(MOST_PX, Math.max(LEAST_PX, ROW_PX * rows.length))}px`;
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
    this.says(this.replicas[row], this.frames[at].unix_s, value === null ? "not known" : this.shown(value));
  }
}
