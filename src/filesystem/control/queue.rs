//! The few threads that work off the lines written to control files, so that no FUSE worker opens thousands of files for
//! somebody. It keeps the number of loads that are under way in bounds, and with it the descriptors. A write is answered
//! when its lines are begun, or when its time is up: by a thread of its own, because opening a file can take for ever (a
//! network file system whose server is gone). Called by `fuse` for writes and closes of control files.

use super::lines::Lines;
use super::{Action, PATIENCE};
use crate::cache::{Answer, Ask, Cache, Outcome};
use crate::failure::{Failure, Result};
use crate::filesystem::beneath;
use crate::protocol::{Code, NONE};
use crate::source::OpenFile;
use parking_lot::{Condvar, Mutex};
use rustix::process::{Resource, getrlimit};
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Loads from control files that may be under way at once, where there are descriptors for so many: each holds one of its
/// file. Small ones go to the loader by the hundred.
const UNDER_WAY_LIMIT: usize = 4000;
/// Of the descriptors that the daemon may have, this part is for them.
const SHARE_OF_DESCRIPTORS: usize = 8;
/// Threads that open files, at least: one opens some 50,000 in a second, and a slow file system keeps it waiting.
const THREADS: usize = 4;
/// And at most, where there are processors for them.
const MOST_THREADS: usize = 8;

/// Lines that a thread takes at a time, at most.
const AT_ONCE: usize = 32;
/// Longer than this a thread keeps no open file to itself, unless one that it opens next never answers.
const HASTE: Duration = Duration::from_millis(1);

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
    under_way: usize,
    /// As many are under way as may be: nothing is begun until a quarter of them is over, so that it is not done one by one.
    full: bool,
    stopping: bool,
}

/// The lines of one write.
struct Job {
    lines: Arc<Lines>,
    paths: VecDeque<(usize, PathBuf)>,
    deadline: Instant,
    begun: Option<Begun>,
    /// Had by each thread that is beginning a line of it.
    token: Arc<()>,
}

/// What the thread works with.
struct Worker {
    root: OwnedFd,
    mountpoint: PathBuf,
    cache: Arc<Cache>,
    queue: Weak<Queue>,
    limit: usize,
    threads: usize,
}

impl Queue {
    /// `root` is the source's directory.
    pub(crate) fn start(root: OwnedFd, mountpoint: &Path, cache: Arc<Cache>) -> Result<Arc<Queue>> {
        let queue = Arc::new(Queue { state: Mutex::default(), changed: Condvar::new() });
        let descriptors =
            getrlimit(Resource::Nofile).current.map_or(UNDER_WAY_LIMIT, |n| n as usize / SHARE_OF_DESCRIPTORS);
        let limit = descriptors.clamp(1, UNDER_WAY_LIMIT);
        let mountpoint = mountpoint.to_path_buf();
        let threads = std::thread::available_parallelism().map_or(THREADS, usize::from).clamp(THREADS, MOST_THREADS);
        let worker = Arc::new(Worker { root, mountpoint, cache, queue: Arc::downgrade(&queue), limit, threads });
        let failed = |e| Failure::system("cannot start a thread for control files", e);
        let named = |name: &str| std::thread::Builder::new().name(name.to_string());
        for _ in 0..threads {
            let (works, worker) = (Arc::clone(&queue), Arc::clone(&worker));
            named("control").spawn(move || works.work(&worker)).map_err(failed)?;
        }
        let answers = Arc::clone(&queue);
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
        state.jobs.push_back(Job { lines, paths: paths.into(), deadline, begun: Some(begun), token: Arc::new(()) });
        self.changed.notify_all();
    }

    /// Drops what is waiting and ends the threads, without waiting for them.
    pub(crate) fn stop(&self) {
        self.state.lock().stopping = true;
        self.changed.notify_all();
    }

    /// The life of a thread that begins lines.
    fn work(&self, worker: &Worker) {
        let mut state = self.state.lock();
        while !state.stopping {
            let room = !state.full;
            // Giving up needs no room, and makes some.
            let may = |job: &&mut Job| !job.paths.is_empty() && (room || matches!(job.lines.action, Action::Evict));
            let job = state.jobs.iter_mut().find(may);
            let Some(job) = job else {
                self.changed.wait(&mut state);
                continue;
            };
            // A part of what is there, so that the other threads find work too.
            let some = job.paths.len().div_ceil(2 * worker.threads).min(AT_ONCE);
            let paths: Vec<_> = job.paths.drain(..some).collect();
            let (lines, token) = (Arc::clone(&job.lines), Arc::clone(&job.token));
            state.under_way += paths.len();
            state.full |= state.under_way >= worker.limit;
            parking_lot::MutexGuard::unlocked(&mut state, || worker.begin(&lines, paths));
            drop(token);
            if state.jobs.front().is_some_and(Job::is_begun) {
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

    fn one_less(&self, limit: usize) {
        let mut state = self.state.lock();
        state.under_way -= 1;
        if state.full && state.under_way <= limit * 3 / 4 {
            state.full = false;
            self.changed.notify_all();
        }
    }
}

impl State {
    /// Whom to tell now: those whose lines, and all before them, are begun, and those whose time is up. A close has no
    /// lines of its own, and so hears when those before it are begun.
    fn due(&mut self, now: Instant) -> Vec<Begun> {
        let mut due = Vec::new();
        while self.jobs.front().is_some_and(|job| self.stopping || job.is_begun()) {
            due.extend(self.jobs.pop_front().and_then(|job| job.begun));
        }
        due.extend(self.jobs.iter_mut().filter(|job| job.deadline <= now).filter_map(|job| job.begun.take()));
        due
    }
}

impl Job {
    /// Whether every line of it is.
    fn is_begun(&self) -> bool {
        self.paths.is_empty() && Arc::strong_count(&self.token) == 1
    }
}

impl Worker {
    /// Begins some lines of one write.
    fn begin(&self, lines: &Arc<Lines>, paths: Vec<(usize, PathBuf)>) {
        let mut asks = Vec::new();
        let mut since = Instant::now();
        for (number, path) in paths {
            lines.begun(&path);
            match lines.action {
                Action::Preload => asks.extend(self.ask(lines, number, &path)),
                Action::Evict => {
                    let result = self.evict(lines, &path);
                    lines.done(number, result);
                    self.one_less();
                }
            }
            // Those that are open do not wait for the rest where that takes long.
            if since.elapsed() >= HASTE {
                self.cache.materialize_all(NONE, std::mem::take(&mut asks));
                since = Instant::now();
            }
        }
        self.cache.materialize_all(NONE, asks);
    }

    fn one_less(&self) {
        if let Some(queue) = self.queue.upgrade() {
            queue.one_less(self.limit);
        }
    }

    /// What is asked of the cache for a line. Nothing: the file could not be opened, which the line says.
    fn ask(&self, lines: &Arc<Lines>, number: usize, path: &Path) -> Option<(Ask, Answer)> {
        let file = match self.open(lines, path) {
            Ok(file) => file,
            Err(failure) => {
                lines.done(number, Err(failure));
                self.one_less();
                return None;
            }
        };
        let ask = Ask {
            file,
            device: NONE,
            offset: 0,
            length: 0,
            caller: lines.caller.clone(),
            session: None,
            // Nobody waits for the answer: it only says when the load is no longer under way.
            wait: Duration::MAX,
        };
        let (queue, limit, lines) = (self.queue.clone(), self.limit, Arc::clone(lines));
        let answer = move |answer| {
            match answer {
                Ok(Outcome::Resident(_)) => lines.done(number, Ok(())),
                Ok(Outcome::Loading { .. }) => {}
                Err(failure) => lines.done(number, Err(failure)),
            }
            if let Some(queue) = queue.upgrade() {
                queue.one_less(limit);
            }
        };
        Some((ask, Box::new(answer)))
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
