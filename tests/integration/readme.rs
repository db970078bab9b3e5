//! What the README shows is what a reader can type: its commands run, in their order, on a directory of our own.

use crate::harness::*;
use std::process::Command;

#[test]
fn the_commands_of_the_readme_work() {
    let readme = std::fs::read_to_string(tree().join("README.md")).expect("there");
    let mut commands = Vec::new();
    let mut inside = false;
    for line in readme.lines() {
        match line.strip_prefix("```") {
            Some("console") => inside = true,
            Some(_) => inside = false,
            None if inside => commands.push(line.strip_prefix("$ ").expect("commands only in a console block")),
            None => {}
        }
    }
    assert!(commands.len() >= 10, "the blocks were found: {commands:?}");
    // The last word of the tour; the triggers come after it in the text.
    let place = commands.iter().position(|c| c.starts_with("warpfs umount")).expect("it is unmounted");
    let umount = commands.remove(place);
    commands.push(umount);

    let mounted = Mounted::prepare();
    std::fs::create_dir(mounted.source.join("model")).expect("created");
    mounted.file("model/weights.bin", &noise(1, 3 << 20));
    mounted.file("model/config.json", b"{}");
    let programs = warpfs_binary().parent().expect("a folder").to_path_buf();
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap_or_default());
    let (source, mountpoint) = (mounted.source.to_str().expect("text"), mounted.mountpoint.to_str().expect("text"));
    for command in commands {
        let ours = command.replace("/mnt/data", "@MOUNT@").replace("/data", source).replace("@MOUNT@", mountpoint);
        let ours = ours.replace("warpfs mount", &format!("warpfs mount --device {}", device()));
        let output = run(Command::new("sh").args(["-c", &ours]).env("PATH", &path));
        assert!(output.status.success(), "{command}: {}{}", output.text(), output.stderr);
    }
    assert!(!mounted.is_mounted());
}
