//! The lists that follow `-o`, as mount(8) and `/etc/fstab` give them: our own options by the names of the long flags,
//! the generic ones of every file system, and those that only mount(8) and systemd read. What would be a promise that
//! nobody keeps is refused. Called by `mount` only.

use crate::size::Amount;
use crate::transfer::Wanted;

/// One list, parsed. Of options that contradict each other the last counts, as mount(8) has it: it puts its own command
/// line behind the options of fstab.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct List(Vec<Setting>);

#[derive(Clone, Debug, PartialEq)]
enum Setting {
    Device(String),
    Budget(Amount),
    Reserve(Amount),
    Route(Wanted),
    GdsThreshold(Amount),
    GdsCompat,
    Readers(u16),
    Pinned(Amount),
    ReadOnly(bool),
    AllowOther,
    NoPassthrough,
    NonEmpty,
    NoSuid(bool),
    NoDev(bool),
    NoExec(bool),
    /// Accepted, because so many lines of fstab have it, and said to have no effect.
    Vain(String),
}

/// What all lists together ask for.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Options {
    pub(super) device: Option<String>,
    pub(super) budget: Option<Amount>,
    pub(super) reserve: Option<Amount>,
    pub(super) route: Option<Wanted>,
    pub(super) gds_threshold: Option<Amount>,
    pub(super) gds_compat: bool,
    pub(super) readers: Option<u16>,
    pub(super) pinned: Option<Amount>,
    pub(super) read_only: Option<bool>,
    pub(super) allow_other: bool,
    pub(super) no_passthrough: bool,
    pub(super) nonempty: bool,
    pub(super) nosuid: bool,
    pub(super) nodev: bool,
    pub(super) noexec: bool,
    /// Options about access times: the source's own mount decides those.
    pub(super) vain: Vec<String>,
}

/// Read by mount(8), systemd and the like, or what we do anyway.
const FOR_OTHERS: &[&str] = &[
    "defaults",
    "auto",
    "noauto",
    "user",
    "users",
    "nouser",
    "owner",
    "group",
    "nofail",
    "_netdev",
    "async",
    "silent",
    "loud",
    "nomand",
    "symfollow",
    "iversion",
    "noiversion",
    "default_permissions",
    "atime",
    "diratime",
    "relatime",
    "norelatime",
    "nostrictatime",
    "nolazytime",
];
const FOR_OTHERS_PREFIXES: &[&str] = &["x-", "X-", "comment=", "user=", "helper=", "uhelper="];
const VAIN: &[&str] = &["noatime", "nodiratime", "strictatime", "lazytime"];
/// What cannot be had, and why.
const REFUSED: &[(&[&str], &str)] = &[
    (&["remount"], "a mount cannot be changed: unmount it, and mount it again"),
    (&["sync", "dirsync"], "writes are as durable as in the source: mount that file system with it, or use fsync"),
    (&["uid", "gid", "umask", "fmask", "dmask"], "files have the owners and modes that they have in the source"),
    (&["mand"], "there are no mandatory locks"),
    (&["nosymfollow"], "symbolic links are followed as in the source"),
    (&["foreground"], "it is no mount option: use the flag --foreground"),
];

/// Parses one list; the error names the option.
pub(super) fn parse(list: &str) -> Result<List, String> {
    let items = split(list);
    // mount(8) remounts with everything that the kernel says of the mount: the reason is not to be the first of that.
    if items.iter().any(|item| item == "remount") {
        return setting("remount").map(|_| List::default());
    }
    let settings = items.iter().map(|item| setting(item)).collect::<Result<Vec<_>, _>>()?;
    Ok(List(settings.into_iter().flatten().collect()))
}

/// Splits at commas, but not at those after a backslash or between double quotes, which are taken off.
fn split(list: &str) -> Vec<String> {
    let (mut items, mut quoted) = (vec![String::new()], false);
    let mut letters = list.chars();
    while let Some(letter) = letters.next() {
        let letter = match letter {
            '\\' => letters.next().unwrap_or('\\'),
            '"' => {
                quoted = !quoted;
                continue;
            }
            ',' if !quoted => {
                items.push(String::new());
                continue;
            }
            plain => plain,
        };
        items.last_mut().expect("never empty").push(letter);
    }
    items.retain(|item| !item.is_empty());
    items
}

/// Nothing for what is others' business.
fn setting(item: &str) -> Result<Option<Setting>, String> {
    if FOR_OTHERS.contains(&item) || FOR_OTHERS_PREFIXES.iter().any(|prefix| item.starts_with(prefix)) {
        return Ok(None);
    }
    let (name, value) = item.split_once('=').map_or((item, None), |(name, value)| (name, Some(value)));
    if let Some((_, why)) = REFUSED.iter().find(|(names, _)| names.contains(&name)) {
        return Err(format!("`{name}`: {why}"));
    }
    let given = || value.filter(|value| !value.is_empty()).ok_or_else(|| format!("`{name}` needs a value"));
    let amount =
        |make: fn(Amount) -> Setting| given()?.parse().map(make).map_err(|why: String| format!("`{item}`: {why}"));
    let alone = |setting: Setting| match value {
        None => Ok(setting),
        Some(_) => Err(format!("`{name}` takes no value")),
    };
    let setting = match name.replace('_', "-").as_str() {
        "device" => given().map(|value| Setting::Device(value.to_string())),
        "budget" => amount(Setting::Budget),
        "reserve" => amount(Setting::Reserve),
        "route" => given()?.parse().map(Setting::Route).map_err(|why| format!("`{item}`: {why}")),
        "gds-threshold" => amount(Setting::GdsThreshold),
        "gds-compat" => alone(Setting::GdsCompat),
        "readers" => given()?.parse().map(Setting::Readers).map_err(|_| format!("`{item}`: not a number")),
        "pinned" => amount(Setting::Pinned),
        "ro" | "read-only" => alone(Setting::ReadOnly(true)),
        "rw" => alone(Setting::ReadOnly(false)),
        "allow-other" => alone(Setting::AllowOther),
        "no-passthrough" => alone(Setting::NoPassthrough),
        "nonempty" => alone(Setting::NonEmpty),
        "nosuid" => alone(Setting::NoSuid(true)),
        "suid" => alone(Setting::NoSuid(false)),
        "nodev" => alone(Setting::NoDev(true)),
        "dev" => alone(Setting::NoDev(false)),
        "noexec" => alone(Setting::NoExec(true)),
        "exec" => alone(Setting::NoExec(false)),
        _ if VAIN.contains(&name) => alone(Setting::Vain(name.to_string())),
        _ => Err(format!("`{name}` is no option of warpfs, nor one of mount(8) that it knows")),
    };
    setting.map(Some)
}

impl Options {
    /// The lists, one after the other.
    pub(super) fn of(lists: Vec<List>) -> Options {
        let mut all = Options::default();
        for setting in lists.into_iter().flat_map(|list| list.0) {
            match setting {
                Setting::Device(device) => all.device = Some(device),
                Setting::Budget(budget) => all.budget = Some(budget),
                Setting::Reserve(reserve) => all.reserve = Some(reserve),
                Setting::Route(route) => all.route = Some(route),
                Setting::GdsThreshold(threshold) => all.gds_threshold = Some(threshold),
                Setting::GdsCompat => all.gds_compat = true,
                Setting::Readers(readers) => all.readers = Some(readers),
                Setting::Pinned(pinned) => all.pinned = Some(pinned),
                Setting::ReadOnly(read_only) => all.read_only = Some(read_only),
                Setting::AllowOther => all.allow_other = true,
                Setting::NoPassthrough => all.no_passthrough = true,
                Setting::NonEmpty => all.nonempty = true,
                Setting::NoSuid(nosuid) => all.nosuid = nosuid,
                Setting::NoDev(nodev) => all.nodev = nodev,
                Setting::NoExec(noexec) => all.noexec = noexec,
                Setting::Vain(name) => all.vain.push(name),
            }
        }
        all
    }
}

/// The value of a flag and that of the option of the same name, which must not contradict each other.
pub(super) fn agreed<T: PartialEq>(name: &str, flag: Option<T>, option: Option<T>) -> Result<Option<T>, String> {
    match (flag, option) {
        (Some(flag), Some(option)) if flag != option => {
            Err(format!("--{name} and the same option after -o contradict each other: say one"))
        }
        (flag, option) => Ok(flag.or(option)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(lists: &[&str]) -> Options {
        Options::of(lists.iter().map(|list| parse(list).expect("well formed")).collect())
    }

    #[test]
    fn our_own_options_have_the_names_of_the_flags() {
        let all = options(&["device=host,budget=1GiB,reserve=5%,ro,allow_other,no-passthrough,nonempty"]);
        assert_eq!(all.device.as_deref(), Some("host"));
        assert_eq!((all.budget, all.reserve), (Some(Amount::Bytes(1 << 30)), Some(Amount::Percent(5.0))));
        assert_eq!((all.read_only, all.allow_other, all.no_passthrough, all.nonempty), (Some(true), true, true, true));
        let more = options(&["route=posix,gds_threshold=1MiB,gds-compat,readers=3,pinned=64MiB"]);
        assert_eq!((more.route, more.readers, more.gds_compat), (Some(Wanted::Posix), Some(3), true));
        assert_eq!((more.gds_threshold, more.pinned), (Some(Amount::Bytes(1 << 20)), Some(Amount::Bytes(64 << 20))));
        assert_eq!(
            all,
            options(&["device=host,budget=1GiB,reserve=5%", "read-only,allow-other,no_passthrough,nonempty"])
        );
    }

    #[test]
    fn what_others_read_is_none_of_our_business() {
        let all = "defaults,,auto,noauto,user,user=me,nofail,_netdev,x-systemd.automount,comment=a=b,relatime,async";
        assert_eq!(options(&[all]), Options::default());
        assert_eq!(options(&["noatime"]).vain, ["noatime"]);
    }

    #[test]
    fn the_last_of_two_that_contradict_counts() {
        let all = options(&["ro,noexec,nosuid,nodev,budget=1GiB", "rw,exec,budget=2GiB"]);
        assert_eq!((all.read_only, all.noexec, all.nosuid, all.nodev), (Some(false), false, true, true));
        assert_eq!(all.budget, Some(Amount::Bytes(2 << 30)));
    }

    #[test]
    fn commas_belong_to_a_value_after_a_backslash_and_between_quotes() {
        assert_eq!(options(&[r"device=cuda:0\,cuda:1,ro"]).device.as_deref(), Some("cuda:0,cuda:1"));
        assert_eq!(options(&[r#"device="cuda:0,cuda:1",ro"#]).device.as_deref(), Some("cuda:0,cuda:1"));
        assert_eq!(split(r"a\\,b\"), [r"a\", r"b\"]);
    }

    #[test]
    fn what_cannot_be_had_is_refused_by_name() {
        for (list, words) in [
            ("rw,frobnicate", "`frobnicate` is no option"),
            ("rw,sync", "`sync`: writes"),
            ("uid=3", "`uid`: files have"),
            ("user_id=0,remount,ro", "`remount`: a mount cannot be changed"),
            ("ro=1", "`ro` takes no value"),
            ("device", "`device` needs a value"),
            ("budget=", "`budget` needs a value"),
            ("budget=lots", "`budget=lots`"),
            ("route=fast", "`route=fast`: the routes are"),
            ("readers=many", "`readers=many`: not a number"),
            ("foreground", "--foreground"),
        ] {
            let said = parse(list).expect_err(list);
            assert!(said.contains(words), "{list}: {said}");
        }
    }

    #[test]
    fn a_flag_and_an_option_agree_or_are_refused() {
        assert_eq!(agreed("device", Some("host"), Some("host")), Ok(Some("host")));
        assert_eq!(agreed("device", None, Some("host")), Ok(Some("host")));
        assert!(agreed("read-only", Some(true), Some(false)).is_err_and(|said| said.contains("--read-only")));
    }
}
