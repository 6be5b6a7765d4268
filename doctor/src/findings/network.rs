//! Checks of interfaces, the cluster's nodes and the paths between them.

use super::{BTreeSet, Facts, Found, Interface, NodePath, Severity, list, ok, or_ok};

/// Smaller interfaces carry no QUIC datagram of 1,200 bytes with its headers.
const LEAST_MTU: u32 = 1280;
/// Ethernet's.
const USUAL_MTU: u32 = 1500;
/// Seconds between wall clocks: logs and traces are hard to read; certificates are refused from five minutes on.
const CLOCK_WARNING: f64 = 5.0;
const CLOCK_PROBLEM: f64 = 60.0;
/// A path below this share of what is possible is reported, and below the second one is a problem.
const RATE_WARNING: f64 = 0.5;
const RATE_PROBLEM: f64 = 0.25;

pub(super) fn interface(facts: &Facts) -> Found {
    let mut found = Vec::new();
    let known = facts.baseline.as_ref().map(|baseline| baseline.interfaces.as_slice()).unwrap_or_default();
    for Interface { name, mtu, megabits, physical } in &facts.interfaces {
        // Virtual machines and containers have smaller MTUs by design, and no speed.
        let least = if *physical && megabits.is_some() { USUAL_MTU } else { LEAST_MTU };
        if *mtu < least {
            let severity = if *mtu < LEAST_MTU { Severity::Problem } else { Severity::Warning };
            let fact = format!("{name} has an MTU of {mtu} bytes, at least {least} expected");
            found.push((
                severity,
                fact,
                format!("ip link set {name} mtu 9000 where the network allows it, equal on all nodes and the switch"),
            ));
        }
        let best = known.iter().find(|known| known.name == *name).and_then(|known| known.megabits);
        if let (Some(now), Some(best)) = (*megabits, best)
            && now < best
        {
            let fact = format!("{name} has {now} Mbit/s, an earlier run saw {best}");
            found.push((Severity::Warning, fact, format!("check the cable and `ethtool {name}`")));
        }
    }
    if facts.interfaces.is_empty() {
        return Vec::new();
    }
    let described = |interface: &Interface| {
        let speed = interface.megabits.map_or(String::new(), |megabits| format!(", {megabits} Mbit/s"));
        format!("{} MTU {}{speed}", interface.name, interface.mtu)
    };
    or_ok(found, || list(facts.interfaces.iter().map(described)))
}

pub(super) fn cluster(facts: &Facts) -> Found {
    let Some(cluster) = &facts.cluster else { return Vec::new() };
    let found = cluster.coordinators.iter().filter_map(|coordinator| {
        let address = &coordinator.address;
        match &coordinator.quorum {
            Ok(Some(false)) => {
                let remedy = "start the other coordinators; see the runbook of KvasirNoQuorum";
                Some((
                    Severity::Problem,
                    format!("{address} knows no leader: changes are refused"),
                    remedy.to_owned(),
                ))
            }
            Ok(_) => None,
            Err(error) => {
                let remedy = "start the coordinator, or name another with --ops HOST:PORT";
                Some((Severity::Problem, error.clone(), remedy.to_owned()))
            }
        }
    });
    or_ok(found.collect(), || {
        format!("{} coordinators answer, {} nodes", cluster.coordinators.len(), cluster.nodes.len())
    })
}

pub(super) fn version(facts: &Facts) -> Found {
    let Some(cluster) = &facts.cluster else { return Vec::new() };
    let versions: BTreeSet<&str> = cluster.nodes.iter().filter_map(|node| node.version.as_deref()).collect();
    match versions.len() {
        0 => Vec::new(),
        1 => ok(format!("all nodes run {}", list(versions))),
        _ => {
            let of = |version: &str| {
                let nodes = cluster.nodes.iter().filter(|node| node.version.as_deref() == Some(version));
                format!("{version} ({})", list(nodes.map(|node| &node.name)))
            };
            let fact = format!(
                "the nodes run {} versions: {}",
                versions.len(),
                list(versions.iter().map(|v| of(v)))
            );
            vec![(
                Severity::Warning,
                fact,
                "finish the upgrade or roll it back (docs/guides/upgrade.md)".to_owned(),
            )]
        }
    }
}

pub(super) fn clock(facts: &Facts) -> Found {
    let Some(cluster) = &facts.cluster else { return Vec::new() };
    let known: Vec<(&str, f64)> =
        cluster.nodes.iter().filter_map(|node| Some((node.name.as_str(), node.ahead_s?))).collect();
    let apart = known.iter().filter(|(_, ahead)| ahead.abs() > CLOCK_WARNING);
    let found = apart.map(|(name, ahead)| {
        let severity = if ahead.abs() > CLOCK_PROBLEM { Severity::Problem } else { Severity::Warning };
        let way = if *ahead > 0.0 { "ahead" } else { "behind" };
        let fact = format!(
            "the clock of {name} is {:.0} s {way}, at most {CLOCK_WARNING:.0} s expected",
            ahead.abs()
        );
        (severity, fact, "synchronise the clocks: chrony or systemd-timesyncd on every node".to_owned())
    });
    let found: Found = found.collect();
    if known.is_empty() {
        return Vec::new();
    }
    or_ok(found, || format!("the clocks of {} nodes differ by at most {CLOCK_WARNING:.0} s", known.len()))
}

pub(super) fn link(facts: &Facts) -> Found {
    let mut found = Vec::new();
    let mut good = Vec::new();
    for NodePath { node, interface, outcome } in &facts.paths {
        let speed = match outcome {
            Ok(speed) => speed,
            Err(error) => {
                let fact = format!("{node} cannot be measured: {error}");
                found.push((
                    Severity::Warning,
                    fact,
                    "open the node's UDP port between all nodes".to_owned(),
                ));
                continue;
            }
        };
        let interface = facts.interfaces.iter().find(|of| Some(&of.name) == interface.as_ref());
        let configured = interface.and_then(|of| of.megabits).map(|megabits| megabits as f64 * 1e6 / 8.0);
        // A path over an interface without a speed is compared with the CPUs alone, which other work may slow.
        let possible = configured.map(|bytes| bytes.min(speed.ceiling));
        let (gigabits, via) = (|bytes: f64| bytes * 8.0 / 1e9, interface.map_or("", |of| of.name.as_str()));
        let measured = format!("{node}: {:.2} Gbit/s", gigabits(speed.rate));
        if let Some(possible) = possible
            && speed.rate < RATE_WARNING * possible
        {
            let severity =
                if speed.rate < RATE_PROBLEM * possible { Severity::Problem } else { Severity::Warning };
            let fact = format!("{measured} over {via}, {:.2} possible", gigabits(possible));
            let remedy =
                format!("check cable, switch and `ethtool -S {via}`; RoCE ports may share one PCIe link");
            found.push((severity, fact, remedy));
        }
        let wanted = interface.map(Interface::datagram);
        if let Some(wanted) = wanted
            && u32::from(speed.datagram) < wanted.saturating_sub(wanted / 8)
        {
            let fact = format!(
                "the path to {node} carries datagrams of {} bytes, {wanted} expected",
                speed.datagram
            );
            let remedy = "set the same MTU on all nodes and the switch; let ICMP pass".to_owned();
            found.push((Severity::Warning, fact, remedy));
        }
        good.push(measured);
    }
    if facts.paths.is_empty() {
        return Vec::new();
    }
    or_ok(found, || list(good))
}
