// The search runs in a Worker, which browsers refuse to a page that was opened as a file. Here the
// same script runs in a hidden frame of the page instead. A page from a server is left alone.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.onload = () => this.start(frame.contentWindow, String(url));
      document.documentElement.append(frame);
    }

    start(inside, url) {
      if (this.inside) return;
      this.inside = inside;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => Promise.all(urls.map((each) => this.load(each)));
      this.load(url).then(() => {
        for (const data of this.waiting.splice(0)) this.deliver(data);
        this.ready = true;
      });
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script");
        Object.assign(script, { src: url, onload: resolve, onerror: reject });
        this.inside.document.head.append(script);
      });
    }

    deliver(data) {
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }

    postMessage(data) {
      if (this.ready) this.deliver(data);
      else this.waiting.push(data);
    }

    terminate() {}
  };
  window.Worker = window.IFrameWorker;
}
