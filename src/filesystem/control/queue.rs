//! The one thread that works off the lines written to control files, so that no FUSE worker opens thousands of files for
//! somebody. It keeps the number of loads that are under way in bounds, and with it the descriptors; a write is answered
//! when its lines are begun, or when its time is up. Called by `fuse` for writes and closes of control files.

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
use std::thread::JoinHandle;
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
    jobs: VecDeque<Job>,
    under_way: usize,
    stopping: bool,
    thread: Option<JoinHandle<()>>,
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
        let thread = std::thread::Builder::new()
            .name("warpfs-control".to_string())
            .spawn({
                let queue = queue.clone();
                move || queue.work(&worker)
            })
            .map_err(|e| Failure::system("cannot start the thread for control files", e))?;
        queue.state.lock().thread = Some(thread);
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
        self.changed.notify_one();
    }

    /// Drops what is waiting and ends the thread.
    pub(crate) fn stop(&self) {
        let thread = {
            let mut state = self.state.lock();
            state.stopping = true;
            self.changed.notify_one();
            state.thread.take()
        };
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    fn work(&self, worker: &Worker) {
        let mut state = self.state.lock();
        while !state.stopping {
            let now = Instant::now();
            let due: Vec<Begun> = state.jobs.iter_mut().filter_map(|job| job.due(now)).collect();
            if !due.is_empty() {
                parking_lot::MutexGuard::unlocked(&mut state, || due.into_iter().for_each(|begun| begun()));
                continue;
            }
            // What is begun is finished in order; a job that is only waiting for its answer has none left to wait for.
            if state.jobs.front().is_some_and(|job| job.paths.is_empty()) {
                state.jobs.pop_front();
                continue;
            }
            let room = state.under_way < UNDER_WAY_LIMIT;
            let next = state.jobs.front_mut().filter(|_| room);
            if let Some((lines, number, path)) =
                next.and_then(|job| job.paths.pop_front().map(|(number, path)| (job.lines.clone(), number, path)))
            {
                state.under_way += 1;
                parking_lot::MutexGuard::unlocked(&mut state, || worker.begin(lines, number, &path));
                continue;
            }
            match state.jobs.iter().filter(|job| job.begun.is_some()).map(|job| job.deadline).min() {
                Some(deadline) => {
                    self.changed.wait_until(&mut state, deadline);
                }
                None => self.changed.wait(&mut state),
            }
        }
        let rest = std::mem::take(&mut state.jobs);
        drop(state);
        rest.into_iter().filter_map(|job| job.begun).for_each(|begun| begun());
    }

    fn one_less(&self) {
        let mut state = self.state.lock();
        state.under_way = state.under_way.saturating_sub(1);
        self.changed.notify_one();
    }
}

impl Job {
    /// Whom to tell now.
    fn due(&mut self, now: Instant) -> Option<Begun> {
        if self.paths.is_empty() || self.deadline <= now { self.begun.take() } else { None }
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
