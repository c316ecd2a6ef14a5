"use strict";
// An image with a mask of the part that may change, painted with a brush.
class Brush {
  #picture; #mask; #isPainting = false; #last = null;

  constructor(picture, mask) {
    this.#picture = picture;
    this.#mask = mask;
    this.image = null;
    this.isPainted = false;
    this.width_px = 24;
    this.erases = false;
    mask.addEventListener("pointerdown", (event) => {
      mask.setPointerCapture(event.pointerId);
      this.#isPainting = true;
      this.#last = null;
      this.#paint(event);
    });
    mask.addEventListener("pointermove", (event) => { if (this.#isPainting) this.#paint(event); });
    for (const name of ["pointerup", "pointercancel"]) mask.addEventListener(name, () => { this.#isPainting = false; });
  }

  // Loads an image file, which is sent unchanged. Throws if it is no image.
  async load(file) {
    const pixels = await createImageBitmap(file);
    for (const canvas of [this.#picture, this.#mask]) [canvas.width, canvas.height] = [pixels.width, pixels.height];
    this.#picture.getContext("2d").drawImage(pixels, 0, 0);
    this.image = file;
    this.isPainted = false;
  }

  clear() {
    this.isPainted = false;
    this.#mask.getContext("2d").clearRect(0, 0, this.#mask.width, this.#mask.height);
  }

  close() {
    this.image = null;
  }

  // The mask as a PNG file, transparent where the image may change.
  maskFile() {
    const file = new OffscreenCanvas(this.#mask.width, this.#mask.height), pen = file.getContext("2d");
    pen.fillRect(0, 0, file.width, file.height);
    pen.globalCompositeOperation = "destination-out";
    pen.drawImage(this.#mask, 0, 0);
    return file.convertToBlob({ type: "image/png" });
  }

  #paint(event) {
    const shown = this.#mask.getBoundingClientRect(), scale = this.#mask.width / shown.width;
    const place = [(event.clientX - shown.left) * scale, (event.clientY - shown.top) * scale];
    const pen = this.#mask.getContext("2d");
    pen.globalCompositeOperation = this.erases ? "destination-out" : "source-over";
    pen.strokeStyle = "#d1495b";
    pen.lineCap = "round";
    pen.lineWidth = this.width_px * scale;
    pen.beginPath();
    pen.moveTo(...(this.#last || place));
    pen.lineTo(...place);
    pen.stroke();
    this.#last = place;
    this.isPainted = true;
  }
}
