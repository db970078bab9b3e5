//! How a load is cut into pieces of work, and which route a piece takes and why. Pure arithmetic: it must touch neither
//! files nor devices. Called by the engine, and by whoever explains a choice.

use super::report::Route;
use std::ops::Range;
use std::str::FromStr;

/// Which routes may be taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wanted {
    /// The best that works, for each file anew.
    #[default]
    Auto,
    /// cuFile and nothing else.
    Gds,
    /// Never cuFile.
    Posix,
}

impl Wanted {
    pub const ALL: [Wanted; 3] = [Wanted::Auto, Wanted::Gds, Wanted::Posix];

    /// The word of the command line.
    pub fn word(self) -> &'static str {
        match self {
            Wanted::Auto => "auto",
            Wanted::Gds => "gds",
            Wanted::Posix => "posix",
        }
    }
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(word: &str) -> Result<Wanted, String> {
        let found = Wanted::ALL.into_iter().find(|wanted| wanted.word() == word);
        found.ok_or_else(|| "the routes are auto, gds and posix".to_string())
    }
}

/// A route, and the reason that a person is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    pub route: Route,
    pub reason: &'static str,
}

/// Between page cache and disk, for `length` bytes of which `cached` are in the page cache, where that is known.
/// `direct`: the file can be read past the page cache.
pub fn choose(cached: Option<u64>, length: u64, direct: bool) -> Choice {
    let buffered = |reason| Choice { route: Route::Buffered, reason };
    match cached {
        Some(cached) if cached * 2 >= length => buffered("it is in the page cache"),
        Some(_) if !direct => buffered("it is not in the page cache, but its file system has no direct reads"),
        Some(_) => Choice { route: Route::Direct, reason: "it is not in the page cache" },
        None => buffered("the kernel tells only its owner and its writers whether it is in the page cache"),
    }
}

/// Bytes of one part of a load that are read in one go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Number of the part.
    pub part: usize,
    /// First byte in the file.
    pub file: u64,
    /// First byte in the allocation.
    pub device: u64,
    /// Bytes.
    pub length: usize,
}

/// Chunks that are copied to the device in one go: one after the other there, with nothing but slack between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work {
    /// At least one.
    pub chunks: Vec<Chunk>,
}

impl Work {
    /// First byte in the allocation.
    pub fn device(&self) -> u64 {
        self.chunks[0].device
    }

    /// Bytes in the allocation, slack between chunks included.
    pub fn length(&self) -> usize {
        let last = self.chunks[self.chunks.len() - 1];
        (last.device + last.length as u64 - self.device()) as usize
    }
}

/// A range of a file and its place in an allocation; bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub offset: u64,
    pub length: u64,
    /// Where the first byte goes.
    pub place: u64,
}

/// What there is to do for a load.
#[derive(Clone, Debug)]
pub enum Plan {
    One(Cut),
    Many(Vec<Span>, Vec<Range<usize>>),
}

impl Plan {
    /// One span in pieces of `size` bytes at most, or many of which each goes whole into a piece, together with those
    /// that follow it as far as they fit. `None` where the numbers overflow, or where one of many is too long, empty, or
    /// not behind the one before.
    pub fn new(spans: Vec<Span>, size: usize) -> Option<Plan> {
        if let [Span { offset, length, place }] = spans[..] {
            return Cut::new(offset, length, place, size).map(Plan::One);
        }
        let mut groups: Vec<Range<usize>> = Vec::new();
        let (mut begin, mut end) = (0, 0);
        for (number, span) in spans.iter().enumerate() {
            let stop = span.place.checked_add(span.length)?;
            span.offset.checked_add(span.length)?;
            if span.length == 0 || span.length > size as u64 || (number > 0 && span.place < end) {
                return None;
            }
            match groups.last_mut() {
                Some(group) if stop - begin <= size as u64 => group.end = number + 1,
                _ => {
                    begin = span.place;
                    groups.push(number..number + 1);
                }
            }
            end = stop;
        }
        Some(Plan::Many(spans, groups))
    }

    /// Pieces of both halves by turns. Of a file of which a part is in the page cache that lets the disk work while the
    /// rest is copied.
    pub fn by_turns(mut self) -> Plan {
        if let Plan::One(cut) = &mut self {
            cut.by_turns = true;
        }
        self
    }

    /// The piece with this number; `None` past the last.
    pub fn work(&self, number: u64) -> Option<Work> {
        let chunks = match self {
            Plan::One(cut) => vec![cut.chunk(number)?],
            Plan::Many(spans, groups) => {
                let group = groups.get(usize::try_from(number).ok()?)?.clone();
                let whole = |part: usize| {
                    let Span { offset, length, place } = spans[part];
                    Chunk { part, file: offset, device: place, length: length as usize }
                };
                group.map(whole).collect()
            }
        };
        Some(Work { chunks })
    }
}

/// A range of a file, cut at multiples of the chunk size *in the file*: that is what read-ahead and direct reads like.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    offset: u64,
    length: u64,
    place: u64,
    size: u64,
    /// Chunks of the two halves by turns, each half in its order.
    by_turns: bool,
}

impl Cut {
    /// Bytes `offset..offset + length` of a file, to `place` and after in an allocation, in chunks of `size` bytes at
    /// most. `None` where the numbers overflow.
    pub fn new(offset: u64, length: u64, place: u64, size: usize) -> Option<Cut> {
        let size = size as u64;
        offset.checked_add(length)?.checked_add(size)?;
        place.checked_add(length)?;
        (size > 0).then_some(Cut { offset, length, place, size, by_turns: false })
    }

    /// Number of chunks.
    pub fn chunks(&self) -> u64 {
        match self.length {
            0 => 0,
            length => (self.offset + length).div_ceil(self.size) - self.offset / self.size,
        }
    }

    /// The chunk with this number; `None` past the last.
    pub fn chunk(&self, number: u64) -> Option<Chunk> {
        if number >= self.chunks() {
            return None;
        }
        let number = match (self.by_turns, number % 2) {
            (false, _) => number,
            (true, 0) => number / 2,
            (true, _) => self.chunks().div_ceil(2) + number / 2,
        };
        let begin = (self.offset / self.size + number) * self.size;
        let (start, end) = (begin.max(self.offset), (begin + self.size).min(self.offset + self.length));
        let device = self.place + (start - self.offset);
        Some(Chunk { part: 0, file: start, device, length: (end - start) as usize })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_range_once_and_in_order() {
        for offset in [0, 1, 511, 4095, 4096, 4097, (5 << 30) + 7] {
            for length in [0, 1, 511, 4095, 4096, 4097, 12288, 100_000] {
                for lead in [0, 88] {
                    let plan = Cut::new(offset, length, lead, 4096).expect("no overflow");
                    let (mut file, mut device) = (offset, lead);
                    for number in 0..plan.chunks() {
                        let chunk = plan.chunk(number).expect("in range");
                        assert_eq!((chunk.file, chunk.device), (file, device));
                        assert!(chunk.length > 0 && chunk.length <= 4096);
                        assert!(number == 0 || chunk.file.is_multiple_of(4096));
                        file += chunk.length as u64;
                        device += chunk.length as u64;
                    }
                    assert_eq!(file, offset + length);
                    assert_eq!(plan.chunk(plan.chunks()), None);
                }
            }
        }
    }

    #[test]
    fn by_turns_each_chunk_comes_once_too() {
        for chunks in [1, 2, 3, 8, 9] {
            let span = Span { offset: 5, length: chunks * 4096 - 7, place: 88 };
            let (plain, turns) =
                (Plan::new(vec![span], 4096).expect("fits"), Plan::new(vec![span], 4096).expect("fits"));
            let all = |plan: &Plan| -> Vec<Work> { (0..).map_while(|number| plan.work(number)).collect() };
            let (mut plain, mut turns) = (all(&plain), all(&turns.by_turns()));
            if chunks == 8 {
                assert_eq!(turns[1], plain[4], "the other half's first is the second");
            }
            plain.sort_by_key(Work::device);
            turns.sort_by_key(Work::device);
            assert_eq!(plain, turns);
        }
    }

    #[test]
    fn numbers_that_overflow_are_refused() {
        assert!(Cut::new(u64::MAX, 1, 0, 4096).is_none());
        assert!(Cut::new(0, 2, u64::MAX, 4096).is_none());
        assert!(Cut::new(0, 1, 0, 0).is_none());
    }

    #[test]
    fn many_files_go_together_as_far_as_they_fit() {
        let span = |length, place| Span { offset: 0, length, place };
        let plan = Plan::new(vec![span(1000, 512), span(1, 1536), span(2000, 2048), span(4096, 4608)], 4096);
        let plan = plan.expect("they fit");
        let first = plan.work(0).expect("work");
        assert_eq!((first.chunks.len(), first.device(), first.length()), (3, 512, 3536));
        assert_eq!(first.chunks[2], Chunk { part: 2, file: 0, device: 2048, length: 2000 });
        let second = plan.work(1).expect("work");
        assert_eq!((second.chunks.len(), second.device(), second.length()), (1, 4608, 4096));
        assert_eq!(plan.work(2), None);
        for wrong in [vec![span(1, 0), span(4097, 256)], vec![span(2, 0), span(1, 1)], vec![span(0, 0), span(1, 1)]] {
            assert!(Plan::new(wrong, 4096).is_none());
        }
    }

    #[test]
    fn what_is_in_the_page_cache_is_read_from_there() {
        let route = |cached, direct| choose(cached, 4096, direct).route;
        assert_eq!(route(Some(4096), true), Route::Buffered);
        assert_eq!(route(Some(2048), true), Route::Buffered, "half of it: a second read of that half would cost more");
        assert_eq!(route(Some(0), true), Route::Direct);
        assert_eq!(route(Some(0), false), Route::Buffered);
        assert_eq!(route(None, true), Route::Buffered);
    }
}
