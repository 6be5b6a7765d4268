//! Agglomerative clustering of voices, as pyannote does it: centroid linkage on vectors of length 1, a
//! threshold of the distance, small clusters joined to the closest large one, then each voice assigned to the
//! closest mean. Merges and the numbers of clusters are those of scipy's `linkage` and `fcluster`.

/// Clusters of fewer voices are joined to others, where there are enough voices.
const MIN_CLUSTER: usize = 12;

/// Limits of the number of clusters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ClusterLimits {
    /// Distance of centroids up to which clusters are merged; 0 to 2.
    pub(super) threshold: f64,
    pub(super) min: usize,
    pub(super) max: usize,
}

/// A merge of two clusters. Voices have the numbers below `n`, the cluster of merge `k` has `n + k`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Merge {
    /// The lower number first.
    parts: [usize; 2],
    distance: f64,
    /// Voices of the new cluster.
    size: usize,
}

/// The cluster of each voice, numbered from 0. Voices are vectors of equal length. Returns the means, too.
pub(super) fn clusters(voices: &[&[f32]], limits: ClusterLimits) -> (Vec<usize>, Vec<Vec<f64>>) {
    let count = voices.len();
    let max = limits.max.min(count).max(1);
    let min = limits.min.clamp(1, max);
    let assigned = match (count, max) {
        (0..=1, _) | (_, 1) => vec![0; count],
        _ => joined(voices, ClusterLimits { min, max, ..limits }),
    };
    let number = assigned.iter().max().map_or(0, |last| last + 1);
    let voices = wide(voices);
    let means = (0..number).map(|cluster| mean(&voices, &assigned, cluster)).collect();
    (assigned, means)
}

/// The mean with the least cosine distance to a voice; ties go to the lowest number.
pub(super) fn closest(voice: &[f32], means: &[Vec<f64>]) -> usize {
    let voice: Vec<f64> = voice.iter().map(|value| f64::from(*value)).collect();
    least(means.iter().map(|mean| cosine_distance(&voice, mean)))
}

fn least(values: impl Iterator<Item = f64>) -> usize {
    let best = |best: (usize, f64), (at, value)| if value < best.1 { (at, value) } else { best };
    values.enumerate().fold((0, f64::INFINITY), best).0
}

fn wide(voices: &[&[f32]]) -> Vec<Vec<f64>> {
    voices.iter().map(|voice| voice.iter().map(|value| f64::from(*value)).collect()).collect()
}

fn mean(voices: &[Vec<f64>], assigned: &[usize], cluster: usize) -> Vec<f64> {
    let mut mean = vec![0.0; voices.first().map_or(0, Vec::len)];
    let mut count = 0.0;
    for (voice, _) in voices.iter().zip(assigned).filter(|(_, assigned)| **assigned == cluster) {
        mean.iter_mut().zip(voice).for_each(|(mean, value)| *mean += value);
        count += 1.0;
    }
    mean.iter_mut().for_each(|mean| *mean /= count);
    mean
}

fn product(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn cosine_distance(a: &[f64], b: &[f64]) -> f64 {
    1.0 - product(a, b) / (product(a, a) * product(b, b)).sqrt()
}

/// At least two voices in at least one and at most `max > 1` clusters.
fn joined(voices: &[&[f32]], limits: ClusterLimits) -> Vec<usize> {
    let mut voices = wide(voices);
    for voice in &mut voices {
        let length = product(voice, voice).sqrt();
        voice.iter_mut().for_each(|value| *value /= length);
    }
    let count = voices.len();
    // 10 % of the voices, rounded to even.
    let tenth = (0.1 * count as f64).round_ties_even() as usize;
    let min_size = MIN_CLUSTER.min(tenth.max(1));
    let merges = linkage(&voices);
    let heights: Vec<f64> = merges.iter().map(|merge| merge.distance).collect();
    let order: Vec<f64> = (0..merges.len()).map(|at| at as f64).collect();
    let large = |clusters: &[usize]| sizes(clusters).into_iter().filter(|size| *size >= min_size).count();

    let mut clusters = flat(&merges, &heights, limits.threshold);
    let found = large(&clusters);
    let wanted = found.clamp(limits.min, limits.max);
    if found != wanted {
        // Stops after another merge, near the threshold, that gives the wanted number.
        let mut merge_order: Vec<usize> = (0..merges.len()).collect();
        let far = |merge: &usize| (heights[*merge] - limits.threshold).abs();
        merge_order.sort_by(|a, b| far(a).total_cmp(&far(b)));
        let mut best = (merges.len(), 1usize);
        let mut is_exact = false;
        for merge in merge_order.into_iter().filter(|merge| merges[*merge].size >= min_size) {
            clusters = flat(&merges, &order, merge as f64);
            let found = large(&clusters);
            if found.abs_diff(wanted) < best.1.abs_diff(wanted) {
                best = (merge, found);
            }
            if found == wanted {
                is_exact = true;
                break;
            }
        }
        if !is_exact {
            clusters = flat(&merges, &order, best.0 as f64);
        }
    }
    join_small(&voices, clusters, min_size)
}

/// Number of voices of each cluster.
fn sizes(clusters: &[usize]) -> Vec<usize> {
    let mut sizes = vec![0; clusters.iter().max().map_or(0, |last| last + 1)];
    clusters.iter().for_each(|cluster| sizes[*cluster] += 1);
    sizes
}

/// Joins each small cluster to the large one with the closest mean, and numbers the large ones anew.
fn join_small(voices: &[Vec<f64>], clusters: Vec<usize>, min_size: usize) -> Vec<usize> {
    let sizes = sizes(&clusters);
    let large: Vec<usize> = (0..sizes.len()).filter(|cluster| sizes[*cluster] >= min_size).collect();
    if large.is_empty() {
        return vec![0; clusters.len()];
    }
    let means: Vec<Vec<f64>> = large.iter().map(|cluster| mean(voices, &clusters, *cluster)).collect();
    let numbers: Vec<usize> = (0..sizes.len())
        .map(|cluster| match large.iter().position(|large| *large == cluster) {
            Some(number) => number,
            None => {
                let small = mean(voices, &clusters, cluster);
                least(means.iter().map(|mean| cosine_distance(&small, mean)))
            }
        })
        .collect();
    clusters.into_iter().map(|cluster| numbers[cluster]).collect()
}

/// Distances of all pairs.
struct Distances {
    count: usize,
    /// Row `i` has the distances to `i + 1..count`.
    values: Vec<f64>,
}

impl Distances {
    fn index(&self, a: usize, b: usize) -> usize {
        let (a, b) = (a.min(b), a.max(b));
        a * (2 * self.count - a - 1) / 2 + b - a - 1
    }

    fn get(&self, a: usize, b: usize) -> f64 {
        self.values[self.index(a, b)]
    }

    fn set(&mut self, a: usize, b: usize, distance: f64) {
        let at = self.index(a, b);
        self.values[at] = distance;
    }
}

/// Merges the two clusters with the closest centroids until one is left.
fn linkage(voices: &[Vec<f64>]) -> Vec<Merge> {
    let count = voices.len();
    let squared = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum() };
    let pairs = (0..count).flat_map(|a| (a + 1..count).map(move |b| (a, b)));
    let values = pairs.map(|(a, b)| squared(&voices[a], &voices[b]).sqrt()).collect();
    let mut distances = Distances { count, values };
    let mut size = vec![1; count];
    let mut id: Vec<usize> = (0..count).collect();
    // The closest cluster behind each one.
    let closest = |distances: &Distances, size: &[usize], row: usize| {
        let others = (row + 1..count).filter(|other| size[*other] > 0);
        others.fold((f64::INFINITY, row), |best, other| {
            let distance = distances.get(row, other);
            if distance < best.0 { (distance, other) } else { best }
        })
    };
    let mut nearest: Vec<(f64, usize)> = (0..count).map(|row| closest(&distances, &size, row)).collect();
    let mut merges = Vec::with_capacity(count.saturating_sub(1));
    for merge in 0..count.saturating_sub(1) {
        let active = (0..count).filter(|row| size[*row] > 0);
        let first = active.min_by(|a, b| nearest[*a].0.total_cmp(&nearest[*b].0)).unwrap_or(0);
        let (distance, second) = nearest[first];
        let (a, b) = (size[first] as f64, size[second] as f64);
        let total = size[first] + size[second];
        let parts = [id[first].min(id[second]), id[first].max(id[second])];
        merges.push(Merge { parts, distance, size: total });
        // The merged cluster takes the second place.
        size[first] = 0;
        size[second] = total;
        id[second] = count + merge;
        for other in (0..count).filter(|other| size[*other] > 0 && *other != second) {
            let (to_a, to_b) = (distances.get(other, first), distances.get(other, second));
            let merged = (a * to_a * to_a + b * to_b * to_b) - a * b * distance * distance / (a + b);
            distances.set(other, second, (merged / (a + b)).max(0.0).sqrt());
        }
        for row in (0..count).filter(|row| size[*row] > 0) {
            let near = nearest[row].1;
            if row == second || near == first || near == second {
                nearest[row] = closest(&distances, &size, row);
            } else if row < second && distances.get(row, second) < nearest[row].0 {
                nearest[row] = (distances.get(row, second), second);
            }
        }
    }
    merges
}

/// The clusters whose merges all have a height of at most `limit`, in scipy's order: depth first, and a
/// cluster's voices after its inner clusters.
fn flat(merges: &[Merge], heights: &[f64], limit: f64) -> Vec<usize> {
    let count = merges.len() + 1;
    let mut highest = heights.to_vec();
    for (at, merge) in merges.iter().enumerate() {
        for part in merge.parts.iter().filter_map(|part| part.checked_sub(count)) {
            highest[at] = highest[at].max(highest[part]);
        }
    }
    let mut clusters = vec![0; count];
    let mut number = 0;
    // The merge inside which all belongs to one cluster.
    let mut leader = None;
    // A merge, and how many of its parts were visited.
    let mut stack = vec![(merges.len() - 1, 0)];
    while let Some((merge, visited)) = stack.last_mut() {
        let merge = *merge;
        if *visited == 0 && leader.is_none() && highest[merge] <= limit {
            leader = Some(merge);
            number += 1;
        }
        if let Some(part) = merges[merge].parts.get(*visited) {
            *visited += 1;
            if let Some(inner) = part.checked_sub(count) {
                stack.push((inner, 0));
            }
            continue;
        }
        for voice in merges[merge].parts.into_iter().filter(|part| *part < count) {
            if leader.is_none() {
                number += 1;
            }
            clusters[voice] = number - 1;
        }
        if leader == Some(merge) {
            leader = None;
        }
        stack.pop();
    }
    clusters
}

#[cfg(test)]
mod tests;
