//! F10: the disk of a coordinator's log is full. The coordinator proposes nothing and does not lead, but
//! serves requests, and recovers when space is freed.

use kvasir_cluster_tests::fleet::{Fleet, Node, ops};
use kvasir_cluster_tests::{binary, http, wait};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const RECOVERY: Duration = Duration::from_secs(45);

/// A file system of 8 MiB; unmounted when dropped.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounted at `dir`, with its previous contents.
    fn under(dir: &Path) -> Self {
        let saved = tempfile::tempdir().unwrap();
        let (dir_name, saved_name) = (dir.to_str().unwrap(), saved.path().to_str().unwrap());
        // The database's unused parts are sparse here, and writing them needs space that does not exist.
        let copy = |from: &str, to: &str| {
            run(
                "cp",
                &["--sparse=always", &format!("{from}/consensus.redb"), &format!("{to}/consensus.redb")],
            );
        };
        copy(dir_name, saved_name);
        run("mount", &["-t", "tmpfs", "-o", "size=8m", "none", dir_name]);
        let disk = Self(dir.to_owned());
        copy(saved_name, dir_name);
        disk
    }

    fn fill(&self) {
        let mut file = File::create(self.0.join("filler")).unwrap();
        let full = std::iter::repeat_with(|| file.write_all(&[1; 1024])).find_map(Result::err);
        assert_eq!(full.unwrap().kind(), ErrorKind::StorageFull);
    }

    fn make_room(&self) {
        fs::remove_file(self.0.join("filler")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: a process that has files open there is about to exit.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Needs root, for mounts.
fn run(program: &str, arguments: &[&str]) {
    assert!(Command::new(program).args(arguments).status().unwrap().success(), "{program} {arguments:?}");
}

fn drain(fleet: &Fleet, coordinator: usize, draining: bool) -> http::HttpAnswer {
    let path = format!("/admin/v1/workers/w0/{}", if draining { "drain" } else { "undrain" });
    fleet.on_host(Node::Coordinator(coordinator), || http::post(ops(), &path, &Value::Null)).unwrap().unwrap()
}

fn role(fleet: &Fleet, coordinator: usize) -> Option<String> {
    Some(fleet.status(coordinator).ok()?["coordinators"][0]["role"].as_str()?.to_owned())
}

fn disk_full(fleet: &Fleet, coordinator: usize) -> bool {
    fleet.metric(coordinator, "kvasir_raft_disk_full").unwrap() == 1.0
}

#[test]
fn a_leader_without_room_leads_no_more_and_answers_all_the_same() {
    let fleet = Fleet::builder("disk-full", &crate::tiny_model(), 3, 2).start(51).unwrap();
    let model = fleet.model().unwrap();
    let full = Node::Coordinator(0);
    // What it keeps before there is a group is not copied to the small disk.
    let member = || (fleet.metric(0, "kvasir_raft_quorum").ok()? == 1.0).then_some(());
    wait::until("c0 is of the group", RECOVERY, member).unwrap();
    fleet.kill(full).unwrap();
    let data = fleet.data_dir(full).join("data");
    let disk = SmallDisk::under(&data);
    fleet.start(full).unwrap();
    fleet.wait_for_workers(0, 2).unwrap();
    let transfer = || {
        let at = ops().to_string();
        let led = fleet.on_host(full, || binary::run(&["coordinators", "transfer", "c0", "--ops", &at]));
        led.unwrap().unwrap().status.success().then_some(())
    };
    wait::until("c0 leads", RECOVERY, transfer).unwrap();
    let reserve = data.join("consensus.reserve");
    wait::until("room is set aside", RECOVERY, || reserve.exists().then_some(())).unwrap();
    disk.fill();

    // Changes succeed until one needs space. Then the leader frees its reserve and transfers leadership.
    let mut draining = false;
    wait::until("the disk is full", RECOVERY, || {
        draining = !draining;
        drain(&fleet, 0, draining);
        disk_full(&fleet, 0).then_some(())
    })
    .unwrap();
    assert!(!reserve.exists());
    wait::until("another one leads", RECOVERY, || (role(&fleet, 0)? != "leader").then_some(())).unwrap();
    let refused = drain(&fleet, 0, true);
    assert_eq!(refused.status, 409);
    assert!(refused.text().unwrap().contains("disk is full"));
    wait::until("the others decide", RECOVERY, || (drain(&fleet, 1, true).status == 204).then_some(()))
        .unwrap();
    let body = json!({"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0});
    assert_eq!(fleet.post(0, "/v1/completions", &body).unwrap().status, 200);

    disk.make_room();
    wait::until("there is room", RECOVERY, || (!disk_full(&fleet, 0)).then_some(())).unwrap();
    assert!(reserve.exists());
    wait::until("it puts changes forward", RECOVERY, || {
        (drain(&fleet, 0, false).status == 204).then_some(())
    })
    .unwrap();
    let undrained = || (fleet.status(2).ok()?["workers"][0]["draining"] == false).then_some(());
    wait::until("the others know", RECOVERY, undrained).unwrap();
    // Its disk contains the agreed state.
    fleet.kill(full).unwrap();
    fleet.start(full).unwrap();
    wait::until("it takes part", RECOVERY, || (role(&fleet, 0)? != "outsider").then_some(())).unwrap();
    wait::until("it decides with the others", RECOVERY, || {
        (drain(&fleet, 0, true).status == 204).then_some(())
    })
    .unwrap();
    drop(fleet);
}
