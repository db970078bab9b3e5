//! cuFile, NVIDIA's library for GPUDirect Storage: whether it is there, and how it is configured. It is never loaded into this
//! process. Called by the checks of GDS.

use super::Finding;
use super::machine::Machine;
use super::probe::{self, Answer};
use serde_json::Value;

pub(super) const LIBRARY: &str = "libcufile";
pub(super) const CONFIGURATION: &str = "cufile.json";

/// The configuration where the environment names no other.
const DEFAULT: &str = "/etc/cufile.json";
/// What of the configuration decides which way bytes go, and the variable that overrules it.
const KEYS: [(&str, &str); 3] = [
    ("allow_compat_mode", "CUFILE_ALLOW_COMPAT_MODE"),
    ("force_compat_mode", "CUFILE_FORCE_COMPAT_MODE"),
    ("use_pci_p2pdma", "CUFILE_USE_PCIP2PDMA"),
];

/// What the configuration says; `None` where it leaves something to the library.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) force_compat: Option<bool>,
    pub(super) p2pdma: Option<bool>,
}

/// Whether the library can be loaded, and the finding.
pub(super) fn library() -> (bool, Finding) {
    let answer = probe::ask();
    (matches!(answer, Answer::Loaded { .. }), told(&answer))
}

fn told(answer: &Answer) -> Finding {
    const INSTALL: &str = "install the package libcufile-MAJOR-MINOR of NVIDIA's CUDA repository, or put the folder of a \
                           libcufile.so.0 (CUDA toolkit; nvidia/cufile/lib of Python's nvidia-cufile) into LD_LIBRARY_PATH";
    match answer {
        Answer::Loaded { path, version } => {
            let version = match version {
                Some(version) => format!("{}.{}", version / 1000, version % 1000 / 10),
                None => "loaded; it does not tell its version".to_string(),
            };
            let path = path.as_deref().map(|path| format!(", {path}")).unwrap_or_default();
            Finding::ok(LIBRARY, format!("{version}{path}"))
        }
        Answer::NotLoaded(why) => Finding::note(LIBRARY, format!("cannot be loaded ({why}): no GDS")).so(INSTALL),
        Answer::Broken(how) => Finding::note(LIBRARY, format!("{how}: no GDS"))
            .so("install the version that belongs to the driver's CUDA; `gdscheck -p` of the package gds-tools may say more"),
    }
}

/// `variable` looks up the environment.
pub(super) fn configuration(machine: &Machine, variable: impl Fn(&str) -> Option<String>) -> (Settings, Finding) {
    // A relative path is the caller's.
    let absolute = |path: String| std::path::absolute(&path).map_or(path, |path| path.to_string_lossy().into_owned());
    let named = variable("CUFILE_ENV_PATH_JSON").filter(|path| !path.is_empty()).map(absolute);
    let path = named.as_deref().unwrap_or(DEFAULT);
    let text = machine.text(path);
    let parsed = text.as_deref().map(|text| serde_json::from_str::<Value>(&without_comments(text)));
    let (file, said) = match (&parsed, named.is_some()) {
        (Some(Ok(file)), _) => (Some(file), path.to_string()),
        (Some(Err(e)), _) => {
            let finding =
                Finding::note(CONFIGURATION, format!("{path} is no JSON ({e}): cuFile refuses to start with it"));
            return (Settings::default(), finding.so("correct it, or take it away: the library has defaults"));
        }
        (None, true) => {
            let finding =
                Finding::note(CONFIGURATION, format!("CUFILE_ENV_PATH_JSON names {path}, which cannot be read"));
            return (Settings::default(), finding.so("correct the variable, or unset it"));
        }
        (None, false) => (None, format!("there is no {path}: the library's defaults")),
    };
    let mut words = Vec::new();
    let mut values = [None; KEYS.len()];
    for ((key, overruling), value) in KEYS.iter().zip(&mut values) {
        *value = file.and_then(|file| file["properties"][key].as_bool());
        let mut by = "";
        if let Some(overruled) = variable(overruling).and_then(|text| truth(&text)) {
            *value = Some(overruled);
            by = " (by the environment)";
        }
        if let Some(value) = value {
            words.push(format!("{key} {value}{by}"));
        }
    }
    let [_, force_compat, p2pdma] = values;
    let said = if words.is_empty() { said } else { format!("{said}; {}", words.join(", ")) };
    let finding = if force_compat == Some(true) {
        Finding::note(CONFIGURATION, format!("{said}: cuFile never goes the direct way"))
            .so("set force_compat_mode to false")
    } else {
        Finding::ok(CONFIGURATION, said)
    };
    (Settings { force_compat, p2pdma }, finding)
}

fn truth(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "true" | "1" => Some(true),
        "false" | "0" => Some(false),
        _ => None,
    }
}

/// JSON as it is without the comments (`//` to the end of the line, `/* */`) that NVIDIA's own file is full of.
fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let mut quoted = false;
    while let Some(letter) = rest.chars().next() {
        let taken = match letter {
            // What a backslash is before stays what it is.
            '\\' if quoted => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
            '"' => {
                quoted = !quoted;
                1
            }
            '/' if !quoted && rest.starts_with("//") => {
                rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
                continue;
            }
            '/' if !quoted && rest.starts_with("/*") => {
                rest = rest.find("*/").map_or("", |end| &rest[end + 2..]);
                continue;
            }
            other => other.len_utf8(),
        };
        out.push_str(&rest[..taken]);
        rest = &rest[taken..];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::super::machine::made::Made;
    use super::*;

    const SHIPPED: &str = r#"{
        // NOTE : a comment, with a "quote
        "logging": { "dir": "/home//x", /* "level": 1 */ "level": "ERROR\"//" },
        "properties": {
            "allow_compat_mode": true, // the end
            "use_pci_p2pdma": false
        }
    }"#;

    fn of(file: Option<&str>, environment: &[(&str, &str)]) -> (Settings, Finding) {
        let made = Made::new();
        if let Some(text) = file {
            made.file(DEFAULT, text);
        }
        configuration(&made.machine(), |name| {
            environment.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string())
        })
    }

    #[test]
    fn the_file_that_nvidia_ships_is_read() {
        let (settings, finding) = of(Some(SHIPPED), &[]);
        assert_eq!(settings, Settings { force_compat: None, p2pdma: Some(false) });
        assert_eq!(finding.what, "/etc/cufile.json; allow_compat_mode true, use_pci_p2pdma false");
        let value: Value = serde_json::from_str(&without_comments(SHIPPED)).expect("JSON");
        assert_eq!((&value["logging"]["dir"], &value["logging"]["level"]), (&"/home//x".into(), &"ERROR\"//".into()));
    }

    #[test]
    fn the_environment_overrules_the_file() {
        let (settings, finding) = of(Some(SHIPPED), &[("CUFILE_USE_PCIP2PDMA", "true")]);
        assert_eq!(settings.p2pdma, Some(true));
        assert!(finding.what.contains("use_pci_p2pdma true (by the environment)"), "{finding:?}");
        let (settings, finding) = of(None, &[("CUFILE_FORCE_COMPAT_MODE", "1")]);
        assert_eq!((settings.force_compat, finding.state), (Some(true), State::Note));
    }

    #[test]
    fn a_file_that_is_missing_is_the_defaults_and_one_that_was_named_is_not() {
        assert_eq!(of(None, &[]).1.state, State::Ok);
        let (_, finding) = of(Some(SHIPPED), &[("CUFILE_ENV_PATH_JSON", "/none.json")]);
        assert!(finding.state == State::Note && finding.what.contains("/none.json"), "{finding:?}");
        assert_eq!(of(Some("{"), &[]).1.state, State::Note);
        assert_eq!(of(Some("{}"), &[]).1.what, DEFAULT);
    }

    #[test]
    fn what_the_child_says_becomes_words() {
        let loaded = Answer::Loaded { path: Some("/lib/libcufile.so.0".into()), version: Some(1150) };
        assert_eq!(told(&loaded).what, "1.15, /lib/libcufile.so.0");
        for answer in [Answer::NotLoaded("no such file".into()), Answer::Broken("is killed by signal 11".into())] {
            let finding = told(&answer);
            assert!(finding.state == State::Note && finding.remedy.is_some(), "{finding:?}");
        }
    }
}
