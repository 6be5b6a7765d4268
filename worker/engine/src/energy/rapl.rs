//! Energy of the processor packages and their memory, by RAPL: `/sys/class/powercap/intel-rapl:*` of Linux, which AMD's
//! processors have too.
//!
//! The counters are those of the whole machine. Of each interval's energy, this process gets its share of the CPU time
//! that all processes used; so the shares of several workers sum to what was measured at most.

use super::EnergySource;
use rustix::time::{ClockId, clock_gettime};
use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};

/// Zones with energy of their own. The others (`core`, `uncore`) are parts of a package; `psys` contains the packages.
const ZONES: [&str; 2] = ["package", "dram"];
const PREFIX: &str = "intel-rapl:";
/// Kernel's unit of CPU time, which is the same on all architectures.
const TICKS_PER_SECOND: f64 = 100.0;
/// Readings over which a share of CPU time is taken, because the machine's CPU time has steps of 10 ms.
const SHARE_READINGS: usize = 6;

/// A zone's counter, which begins again after its largest value.
#[derive(Debug)]
struct Zone {
    energy: PathBuf,
    max_uj: u64,
    last_uj: u64,
}

impl Zone {
    /// `None` if the counter cannot be read: the kernel lets only root read it.
    fn open(folder: &Path) -> Option<Self> {
        let name = fs::read_to_string(folder.join("name")).ok()?;
        ZONES.iter().any(|zone| name.starts_with(zone)).then_some(())?;
        let energy = folder.join("energy_uj");
        let (max_uj, last_uj) = (number(&folder.join("max_energy_range_uj"))?, number(&energy)?);
        Some(Self { energy, max_uj, last_uj })
    }

    /// Energy since the last call.
    fn read(&mut self) -> Option<u64> {
        let now = number(&self.energy)?;
        let more = match now.checked_sub(self.last_uj) {
            Some(more) => more,
            None => self.max_uj.saturating_sub(self.last_uj).saturating_add(now),
        };
        self.last_uj = now;
        Some(more)
    }
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// This process's part of a machine's energy.
pub struct Rapl<F> {
    zones: Vec<Zone>,
    own_uj: f64,
    /// The part of the machine's CPU time since the last call that this process used, 0 to 1.
    share: F,
}

impl<F: FnMut() -> Option<f64>> Rapl<F> {
    /// The zones in `folder`. `None` if there is no package whose counter can be read. `share`: the part of the
    /// machine's CPU time since its last call that this process used, 0 to 1.
    pub fn open(folder: &Path, share: F) -> Option<Self> {
        let mut folders: Vec<PathBuf> =
            fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).collect();
        // Zones inside zones are listed beside them.
        folders
            .retain(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(PREFIX)));
        folders.sort();
        let zones: Vec<Zone> = folders.iter().filter_map(|folder| Zone::open(folder)).collect();
        (!zones.is_empty()).then_some(Self { zones, own_uj: 0.0, share })
    }
}

impl<F: FnMut() -> Option<f64>> EnergySource for Rapl<F> {
    fn read(&mut self) -> Option<u64> {
        let more: Option<Vec<u64>> = self.zones.iter_mut().map(Zone::read).collect();
        let share = (self.share)()?;
        self.own_uj += more?.iter().sum::<u64>() as f64 * share.clamp(0.0, 1.0);
        Some(self.own_uj as u64)
    }
}

/// Returns at each call the part of the machine's CPU time of the last second that this process used.
pub fn cpu_share() -> impl FnMut() -> Option<f64> {
    let mut readings = VecDeque::new();
    move || {
        let own = clock_gettime(ClockId::ProcessCPUTime);
        let own = own.tv_sec as f64 + own.tv_nsec as f64 / 1e9;
        let all = busy_seconds(&fs::read_to_string("/proc/stat").ok()?)?;
        readings.push_back((own, all));
        if readings.len() > SHARE_READINGS {
            readings.pop_front();
        }
        let (own_before, all_before) = readings.front().copied()?;
        let (own, all) = (own - own_before, all - all_before);
        Some(if own <= 0.0 { 0.0 } else { own / all.max(own) })
    }
}

/// CPU time of all processes, from the first line of `/proc/stat`.
fn busy_seconds(stat: &str) -> Option<f64> {
    let times = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
    let times: Vec<u64> = times.map_while(|time| time.parse().ok()).collect();
    let [user, nice, system, _idle, _iowait, irq, softirq, ..] = times[..] else { return None };
    Some((user + nice + system + irq + softirq) as f64 / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    fn zone(folder: &TempDir, zone: &str, name: &str, energy: u64) {
        let folder = folder.path().join(zone);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("name"), format!("{name}\n")).unwrap();
        fs::write(folder.join("max_energy_range_uj"), "262143328850\n").unwrap();
        fs::write(folder.join("energy_uj"), format!("{energy}\n")).unwrap();
    }

    #[test]
    fn packages_and_memory_are_summed_and_a_counter_that_begins_again_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let plant = |package: u64, dram: u64| {
            zone(&folder, "intel-rapl:0", "package-0", package);
            zone(&folder, "intel-rapl:0:0", "core", package);
            zone(&folder, "intel-rapl:0:1", "dram", dram);
            zone(&folder, "intel-rapl:1", "psys", package);
            zone(&folder, "intel-rapl-mmio:0", "package-0", package);
        };
        plant(262_143_328_000, 100);
        let mut rapl = Rapl::open(folder.path(), || Some(1.0)).unwrap();
        assert_eq!(rapl.read(), Some(0));
        plant(262_143_328_500, 110);
        assert_eq!(rapl.read(), Some(510));
        plant(150, 110);
        assert_eq!(rapl.read(), Some(510 + 350 + 150));
    }

    #[test]
    fn a_process_gets_its_share_of_cpu_time() {
        let folder = tempfile::tempdir().unwrap();
        zone(&folder, "intel-rapl:0", "package-0", 0);
        let mut shares = [Some(0.5), Some(0.25), None].into_iter();
        let mut rapl = Rapl::open(folder.path(), move || shares.next().flatten()).unwrap();
        zone(&folder, "intel-rapl:0", "package-0", 1_000);
        assert_eq!(rapl.read(), Some(500));
        zone(&folder, "intel-rapl:0", "package-0", 2_000);
        assert_eq!(rapl.read(), Some(750));
        assert_eq!(rapl.read(), None);
        let mut share = cpu_share();
        share();
        assert!((0.0..=1.0).contains(&share().unwrap()));
        assert_eq!(busy_seconds("cpu  100 20 30 5000 60 7 8 0 9 0\ncpu0 1"), Some(1.65));
        assert_eq!(busy_seconds("cpu  100 x"), None);
    }

    #[test]
    fn counters_that_cannot_be_read_are_absent() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Rapl::open(folder.path(), || Some(1.0)).is_none());
        assert!(Rapl::open(&folder.path().join("none"), || Some(1.0)).is_none());
        zone(&folder, "intel-rapl:0", "package-0", 5);
        let energy = folder.path().join("intel-rapl:0/energy_uj");
        fs::remove_file(&energy).unwrap();
        assert!(Rapl::open(folder.path(), || Some(1.0)).is_none());
        fs::write(&energy, "7\n").unwrap();
        let mut rapl = Rapl::open(folder.path(), || Some(1.0)).unwrap();
        fs::write(&energy, "").unwrap();
        assert_eq!(rapl.read(), None);
    }
}
