//! How a range is cut into chunks, and which route they take and why. Pure arithmetic: it must touch neither files nor
//! devices. Called by the engine, once a load.

/// How bytes reach the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// `pread` through the page cache, then a copy from pinned memory.
    Buffered,
}

/// A route, and the reason that a person is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    pub route: Route,
    pub reason: &'static str,
}

/// The route of a load.
pub fn choose() -> Choice {
    Choice { route: Route::Buffered, reason: "the buffered route serves every file" }
}

/// A piece of a load that is read and copied in one go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// First byte in the file.
    pub file: u64,
    /// First byte in the allocation.
    pub device: u64,
    /// Bytes.
    pub length: usize,
}

/// A range of a file, cut at multiples of the chunk size *in the file*: that is what read-ahead and direct reads like.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    offset: u64,
    length: u64,
    lead: u64,
    size: u64,
}

impl Plan {
    /// Bytes `offset..offset + length` of a file, to `lead` and after in an allocation, in chunks of `size` bytes at most.
    /// `None` where the numbers overflow.
    pub fn new(offset: u64, length: u64, lead: u64, size: usize) -> Option<Plan> {
        let size = size as u64;
        offset.checked_add(length)?.checked_add(size)?;
        lead.checked_add(length)?;
        (size > 0).then_some(Plan { offset, length, lead, size })
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
        let begin = (self.offset / self.size + number) * self.size;
        let (start, end) = (begin.max(self.offset), (begin + self.size).min(self.offset + self.length));
        Some(Chunk { file: start, device: self.lead + (start - self.offset), length: (end - start) as usize })
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
                    let plan = Plan::new(offset, length, lead, 4096).expect("no overflow");
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
    fn numbers_that_overflow_are_refused() {
        assert!(Plan::new(u64::MAX, 1, 0, 4096).is_none());
        assert!(Plan::new(0, 2, u64::MAX, 4096).is_none());
        assert!(Plan::new(0, 1, 0, 0).is_none());
    }
}
