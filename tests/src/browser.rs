//! A headless Chromium, controlled through the W3C WebDriver protocol.

use crate::{binary, http, signal, wait};
use anyhow::{Context, ensure};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// WebDriver's key for element references.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";
/// Disables Chromium's own network traffic: lookups, updates and reports.
const FLAGS: [&str; 8] = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
];

/// A browser with one page; closed when dropped.
#[derive(Debug)]
pub struct Browser {
    driver: Child,
    server: SocketAddr,
    session: String,
}

/// Keys that are not characters.
pub mod keys {
    pub const TAB: char = '\u{e004}';
    pub const ENTER: char = '\u{e007}';
    pub const ESCAPE: char = '\u{e00c}';
}

impl Browser {
    /// Starts a browser. `chromium` and `chromedriver` must be installed as by Debian.
    pub fn start() -> anyhow::Result<Self> {
        let mut driver = Command::new("chromedriver")
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .context("chromedriver is missing: run `./test setup`")?;
        let server = port(&mut driver).map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let mut browser = Self { driver, server: server?, session: String::new() };
        let options = json!({"args": FLAGS, "binary": "/usr/bin/chromium"});
        let capabilities = json!({"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}});
        let session = browser.post("/session", &json!({"capabilities": {"alwaysMatch": capabilities}}))?;
        let id = session["sessionId"].as_str().context("no session")?;
        browser.session = format!("/session/{id}");
        Ok(browser)
    }

    fn post(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        let answer = http::post(self.server, path, body)?.json()?;
        let value = answer["value"].clone();
        ensure!(value["error"].is_null(), "{path}: {}: {}", value["error"], value["message"]);
        Ok(value)
    }

    fn send(&self, command: &str, body: &Value) -> anyhow::Result<Value> {
        self.post(&format!("{}/{command}", self.session), body)
    }

    /// Sends a command of the DevTools protocol.
    fn devtools(&self, command: &str, parameters: Value) -> anyhow::Result<Value> {
        self.send("goog/cdp/execute", &json!({"cmd": command, "params": parameters}))
    }

    /// Shows a page.
    pub fn open(&self, address: &str) -> anyhow::Result<()> {
        self.send("url", &json!({"url": address})).map(drop)
    }

    /// Runs the body of a function in the page and returns what it returns.
    pub fn script(&self, body: &str) -> anyhow::Result<Value> {
        self.send("execute/sync", &json!({"script": body, "args": []}))
    }

    /// Waits until an expression is true in the page.
    pub fn wait_for(&self, description: &str, expression: &str) -> anyhow::Result<()> {
        let script = format!("return Boolean({expression})");
        wait::until(description, binary::NODE_TIMEOUT, || (self.script(&script).ok()? == true).then_some(()))
    }

    /// Clicks the first element that matches a CSS selector. It must be visible and clickable.
    pub fn click(&self, selector: &str) -> anyhow::Result<()> {
        let find = json!({"using": "css selector", "value": selector});
        let name = json!(selector);
        let show = format!(
            "document.querySelector({name})?.scrollIntoView({{block: 'center', behavior: 'instant'}})"
        );
        let click = || {
            // The driver does not scroll a page with emulated size.
            self.script(&show).ok()?;
            let found = self.send("element", &find).ok()?;
            let element = found[ELEMENT].as_str()?;
            self.send(&format!("element/{element}/click"), &json!({})).ok()
        };
        wait::until(&format!("a click on {selector}"), binary::NODE_TIMEOUT, click).map(drop)
    }

    /// Presses and releases keys one after the other on the focused element.
    pub fn press(&self, keys: impl IntoIterator<Item = char>) -> anyhow::Result<()> {
        let stroke =
            |key: char| ["keyDown", "keyUp"].map(|kind| json!({"type": kind, "value": key.to_string()}));
        let strokes: Vec<Value> = keys.into_iter().flat_map(stroke).collect();
        let keyboard = json!({"type": "key", "id": "keyboard", "actions": strokes});
        self.send("actions", &json!({"actions": [keyboard]})).map(drop)
    }

    /// Sets the page size in CSS pixels; each is `scale` pixels on the screen. A narrow page emulates a
    /// phone.
    pub fn resize(&self, width: u32, height: u32, scale: f64) -> anyhow::Result<()> {
        let size =
            json!({"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600});
        self.devtools("Emulation.setDeviceMetricsOverride", size).map(drop)
    }

    /// Emulates the system's colour scheme, and reduced motion so that click targets do not move.
    pub fn prefer_dark(&self, dark: bool) -> anyhow::Result<()> {
        let value = if dark { "dark" } else { "light" };
        let theme = json!({"name": "prefers-color-scheme", "value": value});
        let still = json!({"name": "prefers-reduced-motion", "value": "reduce"});
        self.devtools("Emulation.setEmulatedMedia", json!({"features": [theme, still]})).map(drop)
    }

    /// Writes what is on the screen to a PNG.
    pub fn screenshot(&self, path: &Path) -> anyhow::Result<()> {
        let shot = self.devtools("Page.captureScreenshot", json!({"format": "png"}))?;
        let data = base64(shot["data"].as_str().context("no picture")?).context("not base64")?;
        std::fs::write(path, data).with_context(|| path.display().to_string())
    }

    /// Errors and warnings of the page since the last call.
    pub fn complaints(&self) -> anyhow::Result<Vec<String>> {
        let log = self.send("se/log", &json!({"type": "browser"}))?;
        let entries = log.as_array().context("no log")?;
        Ok(entries.iter().map(|entry| format!("{}: {}", entry["level"], entry["message"])).collect())
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Closes the browser itself; the rest ends with the driver.
        let _ = http::send(self.server, "DELETE", &self.session, &[], b"");
        signal::terminate(self.driver.id());
        let _ = self.driver.wait();
    }
}

/// The driver's port, from its first output lines.
fn port(driver: &mut Child) -> anyhow::Result<u16> {
    let lines = BufReader::new(driver.stdout.take().context("no stdout")?).lines();
    for line in lines.map_while(Result::ok) {
        if let Some((_, port)) = line.split_once("started successfully on port ") {
            return port.trim_end_matches('.').parse().context("not a port");
        }
    }
    anyhow::bail!("chromedriver ended before it was ready")
}

/// Decodes base64 as written by browsers.
fn base64(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for group in text.trim_end_matches('=').as_bytes().chunks(4) {
        let mut bits = 0;
        for (at, byte) in group.iter().enumerate() {
            bits |= u32::from(digit(*byte)?) << (18 - 6 * at);
        }
        bytes.extend(bits.to_be_bytes().into_iter().skip(1).take(group.len() - 1));
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_read() {
        for (text, bytes) in
            [("", &b""[..]), ("TWFu", b"Man"), ("TWE=", b"Ma"), ("TQ==", b"M"), ("/+8=", &[255, 239])]
        {
            assert_eq!(base64(text).as_deref(), Some(bytes), "{text}");
        }
        assert_eq!(base64("T?=="), None);
    }
}
