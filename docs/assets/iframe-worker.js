// The site's search runs in a Worker, and browsers start none for pages opened from a disk (file:). There this class takes
// its place: it runs the same script in a hidden frame, and messages travel as events.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => this.deliver(this, data)
      this.inside.importScripts = async (...urls) => {
        for (const each of urls) await this.load(each)
      }
      this.started = this.load(url)
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const page = this.inside.document, script = page.createElement("script")
        script.src = url
        script.onload = resolve
        script.onerror = () => reject(new Error(`cannot load ${url}`))
        page.body.append(script)
      })
    }

    postMessage(data) {
      this.started.then(() => this.deliver(this.inside, data))
    }

    // A Worker's messages never arrive while their sender still runs.
    deliver(receiver, data) {
      setTimeout(() => receiver.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
  window.IFrameWorker = window.Worker = IFrameWorker
}
