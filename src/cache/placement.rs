//! Where a file's first byte goes in its allocation. A safetensors file gets a lead, so that its tensors lie aligned in
//! device memory; everything else begins at the beginning.

use crate::source::OpenFile;

/// Tensors are aligned to this many bytes in device memory: enough for every vector load and for TMA.
pub const ALIGNMENT: u64 = 256;

/// safetensors' own limit for its header.
const HEADER_LIMIT: u64 = 100_000_000;

/// Bytes before the content, less than [`ALIGNMENT`]. Told by the content and not by the name: eight bytes of header
/// length, then a JSON object, then the data section, which shall be aligned. A file that only looks like that loses
/// nothing by its lead.
pub fn lead(file: &OpenFile, size: u64) -> u64 {
    let mut head = [0; 9];
    if size < head.len() as u64 || rustix::io::pread(file, &mut head, 0) != Ok(head.len()) {
        return 0;
    }
    let (length, json) = head.split_at(8);
    let length = u64::from_le_bytes(length.try_into().expect("eight bytes"));
    if json != b"{" || length > HEADER_LIMIT || length + 8 > size {
        return 0;
    }
    let data = length + 8;
    (ALIGNMENT - data % ALIGNMENT) % ALIGNMENT
}

/// The same of a small file, which is looked into only where its name asks for it: reading the beginning of each of
/// thousands, one after the other, would take longer than loading them.
pub fn small_lead(file: &OpenFile, size: u64) -> u64 {
    if file.path.extension().is_some_and(|word| word == "safetensors") { lead(file, size) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn lead_of(content: &[u8]) -> u64 {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(content).expect("written");
        let size = content.len() as u64;
        lead(&OpenFile::new(std::os::fd::OwnedFd::from(file), std::path::Path::new("f")).expect("a regular file"), size)
    }

    #[test]
    fn the_data_section_of_safetensors_is_aligned() {
        for header in [2_u64, 247, 248, 249, 1000] {
            let mut content = header.to_le_bytes().to_vec();
            content.push(b'{');
            content.resize(8 + header as usize + 100, b' ');
            let lead = lead_of(&content);
            assert!(lead < ALIGNMENT);
            assert_eq!((lead + 8 + header) % ALIGNMENT, 0, "header of {header}");
        }
    }

    #[test]
    fn other_files_have_no_lead() {
        for content in [
            &b""[..],
            b"12345678",
            b"\xff\xff\xff\xff\xff\xff\xff\xff{",
            b"\x20\0\0\0\0\0\0\0{too short",
            b"\x02\0\0\0\0\0\0\0[]",
        ] {
            assert_eq!(lead_of(content), 0, "{content:?}");
        }
    }
}
