//! Tests whether an object is found by each of its names, and whether a refusal names what it is about.

use std::process::Command;

use super::Stage;
use crate::common::daemon::program;
use crate::common::nbd::Client;
use crate::common::{Daemon, Scratch};

#[test]
fn address_is_named_by_the_relative_and_by_the_absolute_form_of_its_path() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("run")).expect("a directory");
    let control = format!("unix:{}", scratch.word("control.sock"));
    let disk = ["--disk", "name=vm1,ram=1M", "--nbd", "unix:nbd.sock"];
    let mut command = Command::new(program());
    command.current_dir(scratch.path("."));
    command.arg("serve").args(disk).args(["--control", &control]);
    let stage = Stage {
        daemon: Daemon::spawn(command),
        scratch,
    };
    let absolute = format!("unix:{}", stage.scratch.word("run/more.sock"));
    for (added, removed) in [
        ("unix:run/more.sock", &*absolute),
        (&absolute, "unix:run/more.sock"),
        ("unix:run/more.sock", "unix:./run/../run/more.sock"),
    ] {
        let add = ["add", "export", &format!("nbd={added}")];
        assert_eq!(stage.ctl(&add).0, 0);
        drop(Client::connect(&stage.scratch.path("run/more.sock"), "vm1").expect("it is served"));
        let (code, said) = stage.ctl(&["add", "export", &format!("nbd={removed}")]);
        let is_there = said.contains(&format!("export {added}: there is one already"));
        assert!(code == 1 && is_there, "{said}");
        let (code, said) = stage.ctl(&["set", "export", removed, "connections=7"]);
        assert_eq!(code, 0, "{said}");
        let (code, said) = stage.ctl(&["remove", "export", removed]);
        assert!(
            code == 0 && said.contains(&format!("close nbd {added}")),
            "{said}"
        );
        assert!(!stage.scratch.path("run/more.sock").exists());
    }
    let (code, said) = stage.ctl(&["remove", "export", &absolute]);
    let parts = [
        &*format!("export {absolute}: no export has this address"),
        "there are: unix:nbd.sock",
        "blkmq ctl dump",
    ];
    assert!(
        code == 1 && parts.iter().all(|part| said.contains(part)),
        "{said}"
    );
    stage.daemon.stop();
}

#[test]
fn file_without_the_control_socket_of_the_daemon_is_refused_by_the_key() {
    let stage = Stage::new(&[]);
    let (code, dumped) = stage.ctl(&["dump"]);
    assert_eq!(code, 0, "{dumped}");
    let file = stage.scratch.word("new.toml");
    let apply = |text: &str| {
        std::fs::write(&file, text).expect("the file can be written");
        stage.ctl(&["apply", &file])
    };
    let socket = format!("socket = \"unix:{}\"", stage.scratch.word("control.sock"));
    assert!(dumped.contains(&socket), "{dumped}");
    let (code, said) = apply(&dumped.replace(&socket, ""));
    let parts = [
        "[control] socket: cannot be changed while the daemon runs",
        "control.sock\" -> default",
        "ctl dump",
        "--take-over",
    ];
    assert!(
        code == 1 && parts.iter().all(|part| said.contains(part)),
        "{said}"
    );
    assert_eq!(apply(&dumped), (0, "nothing differs\n".to_owned()));
    stage.daemon.stop();
}
