//! Every struct and number that crosses a process boundary: the ioctl, the socket between a client and the daemon, and
//! the socket between the daemon and a loader. Nothing here does any work, and nothing but the standard library is
//! imported: `include/warpfs.h` says the same for C, and a test compares the two.
//!
//! All integers are little-endian. Every struct is `repr(C)` without padding, so a C program may use it as it lies.

/// Version of everything in this file. Raised when a struct or a meaning changes.
pub const PROTOCOL_VERSION: u32 = 1;

/// Proves to the ioctl which session it speaks for. All zeros: no session.
pub type Secret = [u8; 16];
/// Names a device between processes. All zeros: the daemon's default device.
pub type DeviceUuid = [u8; 16];
/// The host device has the same identifier everywhere.
pub const HOST_UUID: DeviceUuid = *b"warpfs-host-mem\0";
/// "No session" and "default device".
pub const NONE: [u8; 16] = [0; 16];

/// A value that travels: fixed size, little-endian.
pub trait Field: Sized {
    fn put(&self, out: &mut Vec<u8>);
    fn take(bytes: &mut &[u8]) -> Option<Self>;
}

macro_rules! integer_fields {
    ($($t:ty),*) => {$(
        impl Field for $t {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn take(bytes: &mut &[u8]) -> Option<Self> {
                let (head, rest) = bytes.split_first_chunk::<{ size_of::<$t>() }>()?;
                *bytes = rest;
                Some(<$t>::from_le_bytes(*head))
            }
        }
    )*};
}
integer_fields!(u16, u32, i32, u64);

impl<const N: usize> Field for [u8; N] {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }
    fn take(bytes: &mut &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_first_chunk::<N>()?;
        *bytes = rest;
        Some(*head)
    }
}

/// A struct of [`Field`]s in the order in which they lie in memory.
pub trait Wire: Sized {
    /// Bytes on the wire and in memory.
    const SIZE: usize;
    fn encode(&self) -> Vec<u8>;
    /// Reads the struct from the beginning of `bytes`; what follows it is left to the caller. `None`: too short.
    fn decode(bytes: &[u8]) -> Option<Self>;
    /// The struct with every byte zero.
    fn zeroed() -> Self {
        Self::decode(&vec![0; Self::SIZE]).expect("SIZE bytes are enough")
    }
}

macro_rules! wire {
    ($($(#[$meta:meta])* pub struct $name:ident { $($(#[$fmeta:meta])* pub $field:ident: $t:ty,)* })*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name { $($(#[$fmeta])* pub $field: $t,)* }
        impl Wire for $name {
            const SIZE: usize = size_of::<Self>();
            fn encode(&self) -> Vec<u8> {
                let mut out = Vec::with_capacity(Self::SIZE);
                $(self.$field.put(&mut out);)*
                out
            }
            fn decode(mut bytes: &[u8]) -> Option<Self> {
                let bytes = &mut bytes;
                Some($name { $($field: <$t as Field>::take(bytes)?,)* })
            }
        }
        const _: () = assert!(size_of::<$name>() == 0 $(+ size_of::<$t>())*, "a wire struct has no padding");
    )*};
}

// ---------------------------------------------------------------------------------------------------------------- errors

/// What went wrong, as a number that stays the same between versions. Text goes with it for people.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// No such file, or the name is gone.
    NotFound = 1,
    /// The caller may not read the file.
    Permission = 2,
    /// A directory, FIFO, socket, device or symbolic link where a regular file is needed.
    NotRegular = 3,
    /// The file is larger than the device's whole budget.
    TooLarge = 4,
    /// The budget, or the device, has no room now; the text says who holds it.
    OutOfMemory = 5,
    /// The file changed while it was loaded; try again.
    Changing = 6,
    /// Reading the file failed; `errno` is the system's word.
    Io = 7,
    /// The daemon has no such device, or the device is gone.
    NoDevice = 8,
    /// The loader child died or did not answer.
    Loader = 9,
    /// The message or the arguments make no sense.
    BadRequest = 10,
    /// The peer speaks another protocol version.
    WrongVersion = 11,
    /// The secret belongs to no session of the caller.
    BadSession = 12,
    /// The descriptor is not open for reading.
    NotReadable = 13,
    /// Asked for something that this version does not do.
    Unsupported = 14,
    /// The daemon is shutting down.
    Stopping = 15,
    /// The device reported an error of its own.
    Device = 16,
    /// The session has no hold on that allocation (any more).
    NotHeld = 17,
    /// No daemon answers at the socket.
    NotRunning = 18,
    /// The path is not on a warpfs mount.
    NotWarpfs = 19,
}

impl Code {
    pub const ALL: [Code; 19] = [
        Code::NotFound,
        Code::Permission,
        Code::NotRegular,
        Code::TooLarge,
        Code::OutOfMemory,
        Code::Changing,
        Code::Io,
        Code::NoDevice,
        Code::Loader,
        Code::BadRequest,
        Code::WrongVersion,
        Code::BadSession,
        Code::NotReadable,
        Code::Unsupported,
        Code::Stopping,
        Code::Device,
        Code::NotHeld,
        Code::NotRunning,
        Code::NotWarpfs,
    ];

    pub fn from_number(number: u32) -> Option<Code> {
        Self::ALL.into_iter().find(|c| *c as u32 == number)
    }
}

/// State of a file on a device.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    Absent = 0,
    Loading = 1,
    Resident = 2,
}

impl State {
    pub fn from_number(number: u32) -> Option<State> {
        [State::Absent, State::Loading, State::Resident].into_iter().find(|s| *s as u32 == number)
    }

    /// The word that xattrs, control files and JSON use.
    pub fn word(self) -> &'static str {
        match self {
            State::Absent => "absent",
            State::Loading => "loading",
            State::Resident => "resident",
        }
    }
}

// ----------------------------------------------------------------------------------------------------------------- ioctl

/// The "type" byte of every warpfs ioctl.
pub const IOCTL_TYPE: u8 = 0xF7;

const fn ioctl_number(direction: u32, number: u8, size: usize) -> u32 {
    (direction << 30) | ((size as u32) << 16) | ((IOCTL_TYPE as u32) << 8) | number as u32
}
const READ: u32 = 2;
const READ_WRITE: u32 = 3;

/// `_IOR(0xF7, 0, struct warpfs_version)`, on files and directories of the mount.
pub const IOCTL_VERSION: u32 = ioctl_number(READ, 0, VersionIoctl::SIZE);
/// `_IOWR(0xF7, 1, struct warpfs_materialize)`
pub const IOCTL_MATERIALIZE: u32 = ioctl_number(READ_WRITE, 1, MaterializeIoctl::SIZE);
/// `_IOWR(0xF7, 2, struct warpfs_status)`
pub const IOCTL_STATUS: u32 = ioctl_number(READ_WRITE, 2, StatusIoctl::SIZE);
/// `_IOWR(0xF7, 3, struct warpfs_evict)`
pub const IOCTL_EVICT: u32 = ioctl_number(READ_WRITE, 3, EvictIoctl::SIZE);

/// MATERIALIZE only starts the load and returns at once.
pub const MATERIALIZE_NOWAIT: u32 = 1;
/// MATERIALIZE starts nothing: it ends the file's load, unless another program wants it too.
pub const MATERIALIZE_CANCEL: u32 = 2;
/// Every flag of MATERIALIZE that this version knows; others are refused.
pub const MATERIALIZE_FLAGS: u32 = MATERIALIZE_NOWAIT | MATERIALIZE_CANCEL;

/// Milliseconds for which MATERIALIZE keeps its caller at most before it answers "loading".
pub const MATERIALIZE_WAIT_MS: u32 = 1000;

/// Bytes of text in an ioctl reply, NUL-terminated.
pub const MESSAGE_SIZE: usize = 256;

wire! {
    /// Reply of VERSION: who serves this mount, and where its socket is.
    pub struct VersionIoctl {
        pub protocol: u32,
        /// The daemon's process id, in the daemon's PID namespace.
        pub pid: u32,
        /// Number of devices that the daemon serves.
        pub devices: u32,
        pub reserved: u32,
        /// Path of the channel's socket, NUL-terminated (as in `sockaddr_un`).
        pub socket: [u8; 112],
    }

    /// MATERIALIZE: bring this descriptor's file into device memory, or say where it already is.
    pub struct MaterializeIoctl {
        /// in: the session that shall hold the copy; zeros: no hold, just load.
        pub secret: Secret,
        /// in: the device; zeros: the daemon's default.
        pub device: DeviceUuid,
        /// in: first byte of the range.
        pub offset: u64,
        /// in: bytes of the range; 0: to the end of the file.
        pub length: u64,
        /// in: `MATERIALIZE_*`.
        pub flags: u32,
        /// out: a [`State`].
        pub state: u32,
        /// out: a [`Code`] where the ioctl failed, else 0.
        pub error: u32,
        pub reserved: u32,
        /// out, resident: the allocation; 0 where the range is empty and there is nothing to map.
        pub allocation: u64,
        /// out: bytes of the whole allocation, as it has to be mapped.
        pub allocation_size: u64,
        /// out: where the range begins in the allocation, in bytes.
        pub data_offset: u64,
        /// out: bytes of the range.
        pub data_length: u64,
        /// out: the daemon's number for this version of the file; another version has another number.
        pub generation: u64,
        /// out, loading: bytes that have arrived, of `data_length`.
        pub loaded: u64,
        /// out: what went wrong, NUL-terminated.
        pub message: [u8; MESSAGE_SIZE],
    }

    /// STATUS: where the file stands on a device. Starts nothing.
    pub struct StatusIoctl {
        /// in: the device; zeros: the daemon's default.
        pub device: DeviceUuid,
        /// out: a [`State`].
        pub state: u32,
        /// out: sessions that hold the copy.
        pub holders: u32,
        /// out: bytes of the file.
        pub size: u64,
        /// out: bytes that have arrived.
        pub loaded: u64,
        /// out: the copy's generation, 0 where there is none.
        pub generation: u64,
        /// out: the [`Code`] of the last load if it failed and nothing is resident, else 0.
        pub error: u32,
        pub reserved: u32,
        /// out: text to `error`, NUL-terminated.
        pub message: [u8; MESSAGE_SIZE],
    }

    /// EVICT: give the file's copy up, in the caller's domain.
    pub struct EvictIoctl {
        /// in: the device; zeros: every device.
        pub device: DeviceUuid,
        /// out: bytes freed at once. Small files share memory: it is free with the last of them.
        pub freed: u64,
        /// out: bytes that will be free when their holders let go.
        pub held: u64,
    }
}

// ---------------------------------------------------------------------------------------------------------------- socket

/// First field of a client's first message.
pub const HELLO_MAGIC: u32 = u32::from_le_bytes(*b"wfs\x01");
/// Bytes of a frame's body at most; a longer one ends the connection.
pub const FRAME_LIMIT: u32 = 64 * 1024;

/// Kinds of frame. A reply has its request's kind with [`kind::REPLY`] set, or [`kind::ERROR`], and the request's id.
pub mod kind {
    pub const HELLO: u16 = 1;
    pub const FETCH: u16 = 2;
    pub const RELEASE: u16 = 3;
    pub const REPLY: u16 = 0x8000;
    pub const ERROR: u16 = 0xFFFF;
}

wire! {
    /// Every frame on the socket begins with this.
    pub struct FrameHeader {
        /// Bytes that follow this header.
        pub length: u32,
        pub kind: u16,
        pub reserved: u16,
        /// Chosen by the client, returned in the reply.
        pub id: u64,
    }

    /// First message of a client.
    pub struct Hello {
        pub magic: u32,
        pub version: u32,
        /// What the client can do; none are defined yet.
        pub capabilities: u64,
    }

    /// Answer to [`Hello`], followed by `devices` times [`DeviceEntry`].
    pub struct HelloReply {
        pub version: u32,
        pub devices: u32,
        pub capabilities: u64,
        pub secret: Secret,
    }

    /// One device of the daemon; the first is the default.
    pub struct DeviceEntry {
        pub uuid: DeviceUuid,
        /// A [`DeviceKind`].
        pub kind: u32,
        /// The daemon's ordinal; a client finds the device by `uuid`.
        pub ordinal: u32,
        /// `host` or `cuda:N`, NUL-padded.
        pub label: [u8; 24],
    }

    /// Asks for the descriptor of an allocation on which the session has a hold.
    pub struct Fetch {
        pub allocation: u64,
    }

    /// Answer to [`Fetch`]; the descriptor travels beside it as SCM_RIGHTS.
    pub struct FetchReply {
        pub allocation: u64,
        pub size: u64,
        pub device: DeviceUuid,
    }

    /// Gives back `grants` of the holds that MATERIALIZE granted on an allocation. With the last one the lease ends:
    /// a client unmaps the allocation before it sends it.
    pub struct Release {
        pub allocation: u64,
        pub grants: u64,
    }

    /// Answer that something failed; text follows.
    pub struct ErrorReply {
        /// A [`Code`].
        pub code: u32,
        pub errno: i32,
    }
}

/// What a device is.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    Host = 1,
    Cuda = 2,
}

impl DeviceKind {
    pub fn from_number(number: u32) -> Option<DeviceKind> {
        [DeviceKind::Host, DeviceKind::Cuda].into_iter().find(|k| *k as u32 == number)
    }
}

// ---------------------------------------------------------------------------------------------------------------- loader

/// Kinds of message between daemon and loader (SOCK_SEQPACKET, one message a packet, the kind as its first u32).
pub mod loader_kind {
    /// loader to daemon, once: ready for work.
    pub const READY: u32 = 1;
    /// daemon to loader: [`super::LoadJob`] and its parts, with the descriptors of the allocation (or a socket, over which
    /// that comes as MEMORY) and of each part's file.
    pub const LOAD: u32 = 2;
    /// daemon to loader: [`super::LoadId`]; the load ends with DONE soon.
    pub const CANCEL: u32 = 3;
    /// loader to daemon: [`super::LoadProgress`].
    pub const PROGRESS: u32 = 4;
    /// loader to daemon, once a load: [`super::LoadDone`] and what follows it. The allocation is no longer mapped by the
    /// loader, unless it is a slab.
    pub const DONE: u32 = 5;
    /// loader to daemon instead of READY: [`super::ErrorReply`] and text; the loader exits.
    pub const FAILED: u32 = 6;
    /// daemon to loader: [`super::SlabId`]; nothing more comes into it. Answered with FORGOTTEN.
    pub const FORGET: u32 = 7;
    /// loader to daemon: [`super::SlabId`], which it has not mapped any more.
    pub const FORGOTTEN: u32 = 8;
    /// loader to daemon: [`super::Note`] and text, what it has found out about cuFile.
    pub const NOTE: u32 = 9;
    /// daemon to loader, over the socket that came with a LOAD: the allocation's descriptor. If the socket closes without
    /// it, there is no memory.
    pub const MEMORY: u32 = 10;
}

/// Parts of a load at most: each has a descriptor in the message, of which the system takes 253.
pub const LOAD_PARTS: usize = 128;

wire! {
    pub struct LoaderReady {
        pub version: u32,
        pub pid: u32,
    }

    /// Bring `parts` files into an allocation; as many [`LoadPart`]s follow. One part may have any length; several are in
    /// the order of their places, and none is longer than a slot of the ring.
    pub struct LoadJob {
        pub allocation_size: u64,
        /// The number of the slab that the allocation is, which the loader keeps mapped; 0: it is these parts' alone, and
        /// what they leave of it becomes zeros.
        pub slab: u64,
        pub parts: u32,
        /// 1: the memory is still being made.
        pub coming: u32,
    }

    /// Copy `length` bytes from `offset` of a file to `place` in the allocation.
    pub struct LoadPart {
        /// The daemon's number for it, by which both sides speak of it.
        pub id: u64,
        pub offset: u64,
        pub length: u64,
        pub place: u64,
    }

    /// What the text is about has no other form.
    pub struct Note {
        pub reserved: u64,
    }

    pub struct SlabId {
        pub slab: u64,
    }

    pub struct LoadId {
        pub id: u64,
    }

    pub struct LoadProgress {
        pub id: u64,
        pub loaded: u64,
    }

    /// How a load ended. `routes` [`RouteDone`]s follow, then `fallbacks` [`FallbackDone`]s, then `parts` [`PartDone`]s, then
    /// the texts of the parts that failed.
    pub struct LoadDone {
        pub routes: u32,
        pub fallbacks: u32,
        pub parts: u32,
        pub reserved: u32,
    }

    /// What one route did for a load: buffered, direct, gds and cuFile unverified, in this order.
    pub struct RouteDone {
        pub operations: u64,
        pub bytes: u64,
        pub nanoseconds: u64,
        pub errors: u64,
    }

    /// How often a route was left for one of the reasons, in their order.
    pub struct FallbackDone {
        pub count: u64,
    }

    /// How one part ended.
    pub struct PartDone {
        pub id: u64,
        /// A [`Code`], or 0 where every byte arrived.
        pub code: u32,
        pub errno: i32,
        /// Bytes by route.
        pub buffered: u64,
        pub direct: u64,
        pub gds: u64,
        pub cufile: u64,
        /// Nanoseconds from the load's first read to its last completed copy.
        pub nanoseconds: u64,
        /// Bytes of its text.
        pub text: u64,
    }
}

/// `text` in a fixed field: cut at a character's boundary, always NUL-terminated.
pub fn text_field<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [0; N];
    let mut end = text.len().min(N - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    field[..end].copy_from_slice(&text.as_bytes()[..end]);
    field
}

/// A message in a fixed field: where it does not fit its beginning goes, which is a path; what went wrong and what to do
/// stand at the end.
pub fn message_field<const N: usize>(message: &str) -> [u8; N] {
    const MARK: &str = "...";
    if message.len() < N {
        return text_field(message);
    }
    let mut begin = message.len() - (N - 1 - MARK.len());
    while !message.is_char_boundary(begin) {
        begin += 1;
    }
    text_field(&format!("{MARK}{}", &message[begin..]))
}

/// The text of a fixed field, up to its first NUL.
pub fn field_text(field: &[u8]) -> String {
    let end = field.iter().position(|b| *b == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_struct_survives_the_wire() {
        let mut m = MaterializeIoctl::zeroed();
        m.secret = [7; 16];
        m.length = u64::MAX;
        m.message = text_field("no room: ü");
        let bytes = m.encode();
        assert_eq!(bytes.len(), MaterializeIoctl::SIZE);
        assert_eq!(MaterializeIoctl::decode(&bytes), Some(m));
        assert_eq!(MaterializeIoctl::decode(&bytes[1..]), None);
        assert_eq!(field_text(&m.message), "no room: ü");
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        let field: [u8; 4] = text_field("abüx");
        assert_eq!(field_text(&field), "ab");
        let field: [u8; 9] = message_field("/a/long/path: why");
        assert_eq!(field_text(&field), "...: why");
        let field: [u8; 9] = message_field("/f: why");
        assert_eq!(field_text(&field), "/f: why");
    }

    #[test]
    fn codes_are_their_numbers() {
        for code in Code::ALL {
            assert_eq!(Code::from_number(code as u32), Some(code));
        }
        assert_eq!(Code::from_number(0), None);
    }
}
