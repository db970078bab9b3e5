//! The one thread that works off the lines written to control files, so that no FUSE worker opens thousands of files for
//! somebody. It keeps the number of loads that are under way in bounds, and with it the descriptors. A write is answered
//! when its lines are begun, or when its time is up: by a second thread, because opening a file can take for ever (a
//! network file system whose server is gone). Called by `fuse` for writes and closes of control files.

use super::lines::Lines;
use super::{Action, PATIENCE};
use crate::cache::{Ask, Cache, Outcome};
use crate::failure::{Failure, Result};
use crate::filesystem::beneath;
use crate::protocol::{Code, NONE};
use crate::source::OpenFile;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Loads from control files that may be under way at once: each holds a descriptor of its file.
const UNDER_WAY_LIMIT: usize = 256;
/// After this time a load does not count as under way any more, whatever became of it.
const LOAD_PATIENCE: Duration = Duration::from_secs(600);

/// Told that the lines of a write are begun, or that its time is up.
pub(crate) type Begun = Box<dyn FnOnce() + Send>;

pub(crate) struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// In the order in which they came; worked off from the front.
    jobs: VecDeque<Job>,
    /// A line of the first job was taken and is not begun yet.
    beginning: bool,
    under_way: usize,
    stopping: bool,
}

/// The lines of one write.
struct Job {
    lines: Arc<Lines>,
    paths: VecDeque<(usize, PathBuf)>,
    deadline: Instant,
    begun: Option<Begun>,
}

/// What the thread works with.
struct Worker {
    root: OwnedFd,
    mountpoint: PathBuf,
    cache: Arc<Cache>,
    queue: Weak<Queue>,
}

impl Queue {
    /// `root` is the source's directory.
    pub(crate) fn start(root: OwnedFd, mountpoint: &Path, cache: Arc<Cache>) -> Result<Arc<Queue>> {
        let queue = Arc::new(Queue { state: Mutex::default(), changed: Condvar::new() });
        let worker = Worker { root, mountpoint: mountpoint.to_path_buf(), cache, queue: Arc::downgrade(&queue) };
        let failed = |e| Failure::system("cannot start a thread for control files", e);
        let (works, answers) = (Arc::clone(&queue), Arc::clone(&queue));
        let named = |name: &str| std::thread::Builder::new().name(name.to_string());
        named("control").spawn(move || works.work(&worker)).map_err(failed)?;
        named("control-answers").spawn(move || answers.answer()).map_err(failed)?;
        Ok(queue)
    }

    /// Has `paths` done, and `begun` told when they are, or after 0.9 seconds.
    pub(crate) fn push(&self, lines: Arc<Lines>, paths: Vec<(usize, PathBuf)>, begun: Begun) {
        let mut state = self.state.lock();
        if state.stopping {
            drop(state);
            begun();
            return;
        }
        let deadline = Instant::now() + PATIENCE;
        state.jobs.push_back(Job { lines, paths: paths.into(), deadline, begun: Some(begun) });
        self.changed.notify_all();
    }

    /// Drops what is waiting and ends the threads, without waiting for them.
    pub(crate) fn stop(&self) {
        self.state.lock().stopping = true;
        self.changed.notify_all();
    }

    /// The life of the thread that begins lines.
    fn work(&self, worker: &Worker) {
        let mut state = self.state.lock();
        while !state.stopping {
            let room = state.under_way < UNDER_WAY_LIMIT;
            // Giving up needs no room, and makes some.
            let may = |job: &&mut Job| !job.paths.is_empty() && (room || matches!(job.lines.action, Action::Evict));
            let job = state.jobs.iter_mut().find(may);
            let next =
                job.and_then(|job| job.paths.pop_front().map(|(number, path)| (job.lines.clone(), number, path)));
            let Some((lines, number, path)) = next else {
                self.changed.wait(&mut state);
                continue;
            };
            state.under_way += 1;
            state.beginning = true;
            parking_lot::MutexGuard::unlocked(&mut state, || worker.begin(lines, number, &path));
            state.beginning = false;
            if state.jobs.front().is_some_and(|job| job.paths.is_empty()) {
                self.changed.notify_all();
            }
        }
    }

    /// The life of the thread that answers.
    fn answer(&self) {
        let mut state = self.state.lock();
        loop {
            let due = state.due(Instant::now());
            if !due.is_empty() {
                parking_lot::MutexGuard::unlocked(&mut state, || due.into_iter().for_each(|begun| begun()));
                continue;
            }
            if state.stopping {
                return;
            }
            match state.jobs.iter().filter(|job| job.begun.is_some()).map(|job| job.deadline).min() {
                Some(deadline) => {
                    self.changed.wait_until(&mut state, deadline);
                }
                None => self.changed.wait(&mut state),
            }
        }
    }

    fn one_less(&self) {
        let mut state = self.state.lock();
        state.under_way = state.under_way.saturating_sub(1);
        self.changed.notify_all();
    }
}

impl State {
    /// Whom to tell now: those whose lines, and all before them, are begun, and those whose time is up. A close has no
    /// lines of its own, and so hears when those before it are begun.
    fn due(&mut self, now: Instant) -> Vec<Begun> {
        let mut due = Vec::new();
        while self.stopping || !self.beginning {
            match self.jobs.front() {
                Some(job) if self.stopping || job.paths.is_empty() => {
                    due.extend(self.jobs.pop_front().and_then(|job| job.begun));
                }
                _ => break,
            }
        }
        due.extend(self.jobs.iter_mut().filter(|job| job.deadline <= now).filter_map(|job| job.begun.take()));
        due
    }
}

impl Worker {
    fn begin(&self, lines: Arc<Lines>, number: usize, path: &Path) {
        lines.begun(path);
        match lines.action {
            Action::Preload => self.preload(lines, number, path),
            Action::Evict => {
                let result = self.evict(&lines, path);
                lines.done(number, result);
                self.one_less();
            }
        }
    }

    fn one_less(&self) {
        if let Some(queue) = self.queue.upgrade() {
            queue.one_less();
        }
    }

    fn preload(&self, lines: Arc<Lines>, number: usize, path: &Path) {
        let file = match self.open(&lines, path) {
            Ok(file) => file,
            Err(failure) => {
                lines.done(number, Err(failure));
                return self.one_less();
            }
        };
        let queue = self.queue.clone();
        let ask = Ask {
            file,
            device: NONE,
            offset: 0,
            length: 0,
            caller: lines.caller.clone(),
            session: None,
            // Nobody waits for the answer: it only says when the load is no longer under way.
            wait: LOAD_PATIENCE,
        };
        self.cache.materialize(
            ask,
            Box::new(move |answer| {
                match answer {
                    Ok(Outcome::Resident(_)) => lines.done(number, Ok(())),
                    Ok(Outcome::Loading { .. }) => {}
                    Err(failure) => lines.done(number, Err(failure)),
                }
                if let Some(queue) = queue.upgrade() {
                    queue.one_less();
                }
            }),
        );
    }

    fn evict(&self, lines: &Lines, path: &Path) -> Result<()> {
        let file = self.open(lines, path)?;
        let id = file.version()?.file;
        self.cache.evict(id, NONE, lines.caller.domain).map(|_| ())
    }

    /// With the rights of whoever opened the control file.
    fn open(&self, lines: &Lines, path: &Path) -> Result<OpenFile> {
        let Some(relative) = beneath(&self.mountpoint, path) else {
            let message = format!("{}: is not in {}", path.display(), self.mountpoint.display());
            return Err(Failure::new(Code::NotWarpfs, message));
        };
        let relative = if relative.as_os_str().is_empty() { Path::new(".") } else { relative };
        OpenFile::beneath(self.root.as_fd(), relative, &lines.caller.identity)
    }
}
