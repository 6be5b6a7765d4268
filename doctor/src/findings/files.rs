//! Checks of limits, disks, owners and modes.

use super::{Facts, Found, Severity, list, ok, or_ok, size};

/// User id of root.
const ROOT: u32 = 0;
/// Open files of a coordinator at its default of 4,096 HTTP connections, with as many to spare.
const WANTED_FILES: u64 = 8192;
/// Fewer are used up by the workers and the group alone.
const NEEDED_FILES: u64 = 1024;
const GIB: u64 = 1 << 30;
/// Less room ends writes soon: (bytes, share of the disk). Below either, whichever is less.
const NEARLY_FULL: (u64, f64) = (GIB, 0.05);
/// Less room is reported.
const FILLING: (u64, f64) = (5 * GIB, 0.1);

pub(super) fn file_descriptors(facts: &Facts) -> Found {
    let Some(limit) = facts.file_limit else { return Vec::new() };
    let soft = limit.soft;
    let severity = match soft {
        ..NEEDED_FILES => Severity::Problem,
        NEEDED_FILES..WANTED_FILES => Severity::Warning,
        _ => return ok(format!("{soft} open files allowed, {WANTED_FILES} needed")),
    };
    let fact = format!("{soft} open files allowed, {WANTED_FILES} needed");
    let remedy = match limit.hard.is_none_or(|hard| hard >= WANTED_FILES) {
        true => "ulimit -n 65536 before the start, LimitNOFILE=65536 in a systemd unit",
        false => "raise the hard limit: LimitNOFILE=65536 in a systemd unit, or /etc/security/limits.conf",
    };
    vec![(severity, fact, remedy.to_owned())]
}

pub(super) fn disk_room(facts: &Facts) -> Found {
    let below = |disk: &crate::Disk, (bytes, share): (u64, f64)| {
        disk.free < bytes.min((disk.total as f64 * share) as u64)
    };
    let mut found = Vec::new();
    for disk in &facts.disks {
        let severity = match (below(disk, NEARLY_FULL), below(disk, FILLING)) {
            (true, _) => Severity::Problem,
            (false, true) => Severity::Warning,
            (false, false) => continue,
        };
        let (free, total) = (size(disk.free), size(disk.total));
        let fact = format!("{}: {free} of {total} free", disk.path.display());
        found.push((
            severity,
            fact,
            "delete models that are not used (`kvasir models list`), or move the directory".to_owned(),
        ));
    }
    if facts.disks.is_empty() {
        return Vec::new();
    }
    let roomy = |disk: &crate::Disk| format!("{}: {} free", disk.path.display(), size(disk.free));
    or_ok(found, || list(facts.disks.iter().map(roomy)))
}

/// Files of root that the node reads, such as those of a mounted Secret, are no fault.
pub(super) fn owner(facts: &Facts) -> Found {
    let user = facts.user;
    let foreign = facts.files.iter().filter(|file| file.owner != user && file.owner != ROOT);
    let found: Found = foreign
        .map(|file| {
            let path = file.path.display();
            let fact = format!("{path} belongs to user {}, the node runs as {user}", file.owner);
            (Severity::Problem, fact, format!("chown -R {user} {path}"))
        })
        .collect();
    if facts.files.is_empty() {
        return Vec::new();
    }
    or_ok(found, || format!("{} directories and keys belong to user {user} or root", facts.files.len()))
}

pub(super) fn mode(facts: &Facts) -> Found {
    let mut found = Vec::new();
    for file in &facts.files {
        let path = file.path.display();
        let (others, set) = if file.secret { (0o077, "go-rwx") } else { (0o022, "go-w") };
        // A node reads a mounted Secret, and writes a volume, by its group.
        let others = if file.owner == facts.user { others } else { others & 0o007 };
        // In a directory with the sticky bit nobody replaces files of others.
        let sticky = !file.secret && file.mode & 0o1000 != 0;
        if file.mode & others != 0 && !sticky {
            let fact = format!("{path} has mode {:o}, at most {:o}", file.mode, file.mode & !others);
            let severity = if file.secret { Severity::Problem } else { Severity::Warning };
            found.push((severity, fact, format!("chmod {set} {path}")));
        }
    }
    if facts.files.is_empty() {
        return Vec::new();
    }
    or_ok(found, || "nobody else reads keys or writes directories".to_owned())
}
