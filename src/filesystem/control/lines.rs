//! One open `preload` or `evict` file: the lines written to it and the result of each. Lines may span writes, and the
//! last may lack its newline: it is done when the file is closed, and taken back if it turns out to go on. It does no
//! work itself. Called by `control` and by the queue's thread.

use super::Action;
use crate::failure::{Failure, Result};
use crate::protocol::Code;
use crate::source::Caller;
use parking_lot::Mutex;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// A longer line is no path (PATH_MAX is 4,096, and a mount point may stand before it).
const LINE_LIMIT: usize = 16 * 1024;
/// Names that one handle may have waiting, in bytes.
pub(crate) const WAITING_LIMIT: usize = 16 << 20;
/// Lines that are kept with their results for the reader, at some 300 bytes each; of those after them, only the sums.
const LINES_KEPT: usize = 1 << 16;

pub(crate) struct Lines {
    pub(crate) action: Action,
    /// Whoever opened the file.
    pub(crate) caller: Caller,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    splitter: Splitter,
    results: Vec<Line>,
    more: More,
    /// The result of the unfinished line that a close had done.
    provisional: Option<usize>,
    /// Bytes of names not yet begun.
    waiting: usize,
    /// What a reader gets next: a result, and the rest of one that did not fit.
    next: usize,
    rest: Vec<u8>,
}

/// What became of the lines that are not kept.
#[derive(Default)]
struct More {
    lines: usize,
    done: usize,
    failed: usize,
}

struct Line {
    path: PathBuf,
    /// `None`: on its way.
    result: Option<Result<()>>,
    /// Taken back.
    void: bool,
}

impl Lines {
    pub(crate) fn new(action: Action, caller: Caller) -> Lines {
        Lines { action, caller, state: Mutex::default() }
    }

    /// Takes what was written; the lines that are complete now are returned with the numbers of their results.
    /// `None`: too many are waiting already.
    pub(crate) fn write(&self, data: &[u8]) -> Option<Vec<(usize, PathBuf)>> {
        let mut state = self.state.lock();
        if state.waiting > WAITING_LIMIT {
            return None;
        }
        if let Some(number) = state.provisional.take().filter(|_| !data.is_empty())
            && let Some(line) = state.results.get_mut(number)
        {
            line.void = true;
        }
        let complete = state.splitter.split(data);
        Some(complete.into_iter().filter_map(|line| state.add(&line)).collect())
    }

    /// The unfinished line, if there is one that was not done yet.
    pub(crate) fn unfinished(&self) -> Option<(usize, PathBuf)> {
        let mut state = self.state.lock();
        if state.provisional.is_some() {
            return None;
        }
        let line = state.splitter.rest.clone();
        let added = state.add(&line)?;
        state.provisional = Some(added.0);
        Some(added)
    }

    pub(crate) fn begun(&self, path: &std::path::Path) {
        let mut state = self.state.lock();
        state.waiting = state.waiting.saturating_sub(path.as_os_str().len());
    }

    pub(crate) fn done(&self, number: usize, result: Result<()>) {
        let mut state = self.state.lock();
        match state.results.get_mut(number) {
            Some(line) => line.result = Some(result),
            None => {
                state.more.done += 1;
                state.more.failed += usize::from(result.is_err());
            }
        }
    }

    /// Whether a line failed, as far as is known.
    pub(crate) fn failed(&self) -> bool {
        let state = self.state.lock();
        state.more.failed > 0 || state.results.iter().any(|line| !line.void && matches!(line.result, Some(Err(_))))
    }

    /// The next results as text; nothing at their end, after which they begin anew.
    pub(crate) fn read(&self, size: usize) -> Vec<u8> {
        let mut state = self.state.lock();
        while state.rest.len() < size {
            let text = match state.results.get(state.next) {
                Some(line) if line.void => Vec::new(),
                Some(line) => line.text(),
                None if state.next == state.results.len() && state.more.lines > 0 => state.more.text(),
                None => break,
            };
            state.rest.extend(text);
            state.next += 1;
        }
        let given = state.rest.len().min(size);
        let bytes: Vec<u8> = state.rest.drain(..given).collect();
        if bytes.is_empty() {
            state.next = 0;
        }
        bytes
    }
}

impl State {
    /// Registers a line; an empty one asks for nothing.
    fn add(&mut self, line: &[u8]) -> Option<(usize, PathBuf)> {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            return None;
        }
        let path = PathBuf::from(OsStr::from_bytes(line));
        let number = self.results.len() + self.more.lines;
        let too_long = line.len() >= LINE_LIMIT;
        let result = too_long.then(|| Err(Failure::new(Code::BadRequest, "the line is longer than any path")));
        if self.results.len() < LINES_KEPT {
            self.results.push(Line { path: path.clone(), result, void: false });
        } else {
            self.more.lines += 1;
            self.more.done += usize::from(too_long);
            self.more.failed += usize::from(too_long);
        }
        if too_long {
            return None;
        }
        self.waiting += line.len();
        Some((number, path))
    }
}

impl More {
    fn text(&self) -> Vec<u8> {
        let More { lines, done, failed } = self;
        format!("and {lines} more lines: {} ok, {failed} failed, {} on their way\n", done - failed, lines - done)
            .into_bytes()
    }
}

impl Line {
    fn text(&self) -> Vec<u8> {
        let path = self.path.as_os_str().as_bytes();
        let mut text = match &self.result {
            None => [b"loading ", path].concat(),
            Some(Ok(())) => [b"ok ", path].concat(),
            Some(Err(failure)) => {
                let message = failure.message.replace('\n', " ");
                [b"error ", path, b": ", message.as_bytes()].concat()
            }
        };
        text.push(b'\n');
        text
    }
}

/// Bytes to lines.
#[derive(Default)]
struct Splitter {
    rest: Vec<u8>,
}

impl Splitter {
    /// The lines that are complete with `data`, without their newlines. A line that is too long is cut.
    fn split(&mut self, data: &[u8]) -> Vec<Vec<u8>> {
        let mut complete = Vec::new();
        for part in data.split_inclusive(|b| *b == b'\n') {
            let (text, ends) = match part.strip_suffix(b"\n") {
                Some(text) => (text, true),
                None => (part, false),
            };
            let room = LINE_LIMIT.saturating_sub(self.rest.len());
            self.rest.extend_from_slice(&text[..text.len().min(room)]);
            if ends {
                complete.push(std::mem::take(&mut self.rest));
            }
        }
        complete
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines() -> Lines {
        Lines::new(Action::Preload, Caller::this())
    }

    fn paths(found: Option<Vec<(usize, PathBuf)>>) -> Vec<String> {
        found.expect("room").into_iter().map(|(_, p)| p.display().to_string()).collect()
    }

    #[test]
    fn lines_span_writes_and_empty_ones_are_skipped() {
        let lines = lines();
        assert!(paths(lines.write(b"mod")).is_empty());
        assert_eq!(paths(lines.write(b"el\n\na b\r\nla")), ["model", "a b"]);
        assert_eq!(lines.unfinished().map(|(_, p)| p), Some(PathBuf::from("la")));
        assert_eq!(lines.unfinished(), None, "done once");
    }

    #[test]
    fn a_line_that_goes_on_after_a_close_counts_once() {
        let lines = lines();
        lines.write(b"la");
        let (number, _) = lines.unfinished().expect("the rest");
        lines.done(number, Err(Failure::new(Code::NotFound, "no such file")));
        assert!(lines.failed());
        assert_eq!(paths(lines.write(b"st\n")), ["last"]);
        assert!(!lines.failed());
        lines.done(1, Ok(()));
        assert_eq!(lines.read(100), b"ok last\n");
    }

    #[test]
    fn results_are_read_in_pieces_and_anew_after_the_end() {
        let lines = lines();
        lines.write(b"a\nb\n");
        lines.done(0, Ok(()));
        assert_eq!(lines.read(3), b"ok ");
        assert_eq!(lines.read(100), b"a\nloading b\n");
        assert_eq!(lines.read(100), b"");
        assert_eq!(lines.read(100), b"ok a\nloading b\n");
    }

    #[test]
    fn an_endless_line_is_an_error_and_not_a_leak() {
        let lines = lines();
        lines.write(&vec![b'x'; 3 * LINE_LIMIT]);
        assert!(lines.state.lock().splitter.rest.len() <= LINE_LIMIT);
        assert!(paths(lines.write(b"\n")).is_empty());
        assert!(lines.failed());
    }
}
