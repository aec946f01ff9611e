//! Metrics files and their plots: what is read back, what an SVG shows of it, and runs with little
//! or nothing to show.

mod metrics;
mod support;

use std::ffi::OsStr;
use std::fs;

use crate::table::table;
use clap::Parser;
use support::{BLUE, Fixture, Svg, VERMILION, db, health, held_out, run, step, steps};
use trainer::cli::PlotArgs;
use trainer::metrics::{HealthRecord, Record, TrainRecord};
use trainer::plot::{PlotPanel, PlotSource, plot};

#[test]
fn runs_are_drawn_together() {
    let fixture = Fixture::new();
    let mut first = vec![run("bf16")];
    first.extend(steps((1..=40).map(|i| 3.0 - f64::from(i) * 0.01)));
    first.extend([held_out(20, 2.75), held_out(40, 2.875)]);
    let mut second = vec![run("fp8")];
    second.extend(steps((1..=30).map(|i| 3.1 - f64::from(i) * 0.01)));
    let named = PlotSource { name: Some("<FP8>".into()), ..fixture.run("second", &second) };
    let svg = fixture.plot(&[fixture.run("first", &first), named]);
    let texts = "first · bf16 on cpu · validation: last 2.8750, best 2.7500 (step 20)|&lt;FP8&gt; · fp8 on cpu · no validation loss|\
                 Training loss|Validation loss|Training loss minus first|Throughput|Gradient norm before clipping|\
                 Learning rate|nats per token|tokens/s|optimizer step";
    // The norm of 1 is on an axis of powers of ten.
    for text in texts.split('|').chain(["0.1", "1"]) {
        assert!(svg.texts().contains(&text), "{text}: {:?}", svg.texts());
    }
    for absent in ["moving average", "FP8 health", "Validation loss less"] {
        assert!(!svg.has(absent), "{absent}");
    }
    // The legend, four charts of steps, and the validation losses. The first run has no difference.
    let lengths = |color| svg.curves(color).iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!((lengths(BLUE), lengths(VERMILION)), (vec![2, 40, 2, 40, 40, 40], vec![2, 30, 30, 30, 30, 30]));
}

#[test]
fn coinciding_curves_have_markers_in_turns() {
    let fixture = Fixture::new();
    let [a, b] = ["a", "b"].map(|name| fixture.run(name, &steps((1..=60).map(|i| 3.0 - f64::from(i) * 0.01))));
    let out = fixture.path("two.svg");
    plot(&[a, b], &[PlotPanel::Losses], &out).unwrap();
    let svg = Svg::read(&out);
    assert_eq!(svg.curves(BLUE)[1], svg.curves(VERMILION)[1]);
    let [blue, vermilion] = [BLUE, VERMILION].map(|color| svg.markers(color).split_off(1));
    assert_eq!((blue.len(), vermilion.len()), (5, 5));
    let mut all = [blue.clone(), vermilion.clone()].concat();
    all.sort_unstable();
    assert!(all.windows(2).all(|pair| pair[1].0 - pair[0].0 > 30), "{all:?}");
    assert!(all.iter().step_by(2).eq(&blue) && all.iter().skip(1).step_by(2).eq(&vermilion), "{all:?}");
}

#[test]
fn differences_are_of_the_steps_that_both_have() {
    let fixture = Fixture::new();
    let mut first = steps(vec![3.0; 40]);
    first.push(held_out(40, 2.0));
    let mut second: Vec<_> = (1..=60).step_by(2).map(|i| step(i, if i < 20 { 3.25 } else { 2.75 })).collect();
    second.extend([held_out(40, 2.25), held_out(60, 1.0)]);
    let (f32, fp8) = (fixture.run("f32", &first), fixture.run("fp8", &second));
    let out = fixture.path("difference.svg");
    plot(&[f32, fp8], &[PlotPanel::Difference], &out).unwrap();
    let svg = Svg::read(&out);
    assert!(svg.has("Training loss minus f32") && svg.has("Validation loss minus f32"));
    // Ten points above the line at zero, and ten equally far below it.
    let line = &svg.curves(VERMILION)[1];
    let zero = svg.zero_line();
    let above: Vec<_> = line.iter().map(|point| zero[0].1 - point.1).collect();
    assert_eq!((line.len(), zero[0].0 <= line[0].0, zero[1].0 >= line[19].0), (20, true, true));
    assert!(above[0] > 50 && above[..10] == [above[0]; 10] && above[10..] == [above[10]; 10], "{above:?}");
    assert!((above[0] + above[10]).abs() <= 1, "{above:?}");
    let alone = fixture.plot(&[fixture.run("a", &[step(1, 2.0)]), fixture.run("b", &[step(2, 2.0)])]);
    assert!(!alone.has("minus"), "no step in common");
}

#[test]
fn neither_the_first_losses_nor_a_diverged_run_squash_the_others() {
    let fixture = Fixture::new();
    let loss = |i: i32| if i < 10 { 11.0 } else { 2.0 + f64::from(i % 2) * 0.2 };
    let good = fixture.run("good", &steps((0..400).map(loss)));
    let bad = fixture.run("bad", &steps((0..400).map(|i| if i < 100 { loss(i) } else { 1e9 })));
    let svg = fixture.plot(&[good, bad]);
    let faint = &svg.curves(BLUE)[1];
    let [high, low] = range(&faint[300..302]);
    // The axis has about 230 pixels.
    assert!(low - high > 80, "{low} {high}");
    assert!(faint[..10].iter().all(|point| point.1 < high), "at the end of the axis");
    assert!(svg.has("Values beyond an axis are drawn at its end"));
}

/// Highest and lowest pixel.
fn range(points: &[(i32, i32)]) -> [i32; 2] {
    let heights = || points.iter().map(|point| point.1);
    [heights().min().unwrap(), heights().max().unwrap()]
}

#[test]
fn long_runs_are_thinned_and_keep_their_spikes() {
    let fixture = Fixture::new();
    let spike = 17_123;
    let records = steps((0..50_000).map(|i| if i == spike { 3.0 } else { 2.0 + f64::from(i % 3) * 0.25 }));
    let svg = fixture.plot(&[fixture.run("run", &records)]);
    assert!(svg.has("Thick: exponential moving average, decay 0.9"));
    let curves = svg.curves(BLUE);
    let [faint, smooth] = [&curves[1], &curves[2]];
    let highest = faint.iter().min_by_key(|point| point.1).unwrap();
    let second = faint.iter().filter(|point| *point != highest).map(|point| point.1).min().unwrap();
    let [[high, low], [top, bottom]] = [range(faint), range(&smooth[100..])];
    assert!((1000..=2000).contains(&faint.len()) && second - highest.1 > 40, "{second} {highest:?} of {}", faint.len());
    assert!(bottom - top < (low - high) / 2);
    let share = f64::from(highest.0 - faint[0].0) / f64::from(faint[faint.len() - 1].0 - faint[0].0);
    assert!((share - f64::from(spike) / 5e4).abs() < 0.002, "{share}");
}

#[test]
fn divergence_is_marked_and_a_step_that_was_made_twice_is_drawn_once() {
    let fixture = Fixture::new();
    // The loss may still be finite. Two strokes of an x in each of four charts.
    for loss in [2.4, f64::NAN] {
        let records = [step(1, 3.0), Record { diverged: Some("grad_norm = NaN".into()), ..step(2, loss) }];
        let svg = fixture.plot(&[fixture.run(&format!("{loss}"), &records)]);
        assert!(svg.has("diverged at step 2") && !svg.has("no validation loss") && svg.count("line", BLUE) == 8);
    }
    let again = [step(2, 2.0), step(3, 1.0), held_out(3, 4.0), held_out(3, 1.5)];
    let svg = fixture.plot(&[fixture.run("run", &[&steps([3.0; 3])[..], &again].concat())]);
    assert!(svg.has("validation: last 1.5000, best 1.5000 (step 3)"));
    let drawn = &svg.curves(BLUE)[1];
    assert!(drawn.len() == 3 && drawn[0].1 < drawn[1].1 && drawn[1].1 < drawn[2].1, "{drawn:?}");
}

#[test]
fn strange_runs_are_drawn() {
    let fixture = Fixture::new();
    let nothing = |step| Record { step, train: Some(TrainRecord::default()), ..Default::default() };
    let runs = [
        vec![step(1 << 50, 2.0)],
        vec![step(0, 0.0)],
        vec![held_out(7, 3.0)],
        [steps([1e300, -1e300, 1e29, 0.0, f64::NAN]), vec![step(usize::MAX, 2.0)]].concat(),
        steps([2.0; 500]),
        vec![nothing(1), nothing(2)],
        vec![health(3, &[("layer", db(f64::INFINITY))])],
        vec![health(3, &[("layer", HealthRecord::default())])],
        vec![step(1, 2.0), health(1, &[])],
        vec![health(4, &[("layer", db(1e300))]), health(5, &[("layer", db(-1e300))])],
    ];
    let sources = runs.iter().enumerate().map(|(i, records)| fixture.run(&format!("run{i}"), records));
    let mut sources: Vec<_> = sources.collect();
    sources.iter().for_each(|source| drop(fixture.plot(std::slice::from_ref(source))));
    sources.extend([fixture.run("without", &[run("fp8")]), fixture.run("lost", &steps([f64::NAN; 9]))]);
    let svg = fixture.plot(&sources);
    assert!((0..runs.len()).all(|i| svg.has(&format!("run{i}"))) && svg.has("without") && svg.has("lost"));
}

#[test]
fn a_run_without_a_name_has_the_end_of_its_path() {
    let fixture = Fixture::new();
    let records = steps([2.0, 1.0]);
    let long = format!("begins{}ends", "-and-goes-on".repeat(15));
    let (named, existing) = (fixture.run(&long, &records), fixture.run("lr=3", &records).path);
    let unnamed = PlotSource { name: None, path: existing.clone() };
    let svg = fixture.plot(&[named, unnamed.clone()]);
    assert!(svg.has("begins-and-goes-on-and-g…") && svg.texts().iter().any(|text| text.starts_with("lr=3 ")));
    let other = PlotSource { name: None, path: fixture.run("a/lr=3", &records).path };
    assert!(fixture.plot(&[unnamed.clone(), other]).has("a/lr=3 "));
    let parse = |text: &OsStr| PlotSource::parse(text).unwrap();
    assert_eq!(parse(existing.as_os_str()), unnamed);
    assert_eq!(parse(OsStr::new("a b=c=d")), PlotSource { name: Some("a b".into()), path: "c=d".into() });
}

#[test]
fn health_is_a_cell_for_each_layer_and_sample() {
    let fixture = Fixture::new();
    let flushed = HealthRecord { flushed: 0.5, ..db(30.0) };
    let non_finite = HealthRecord { non_finite: 1, ..db(30.0) };
    let mut worst = health(2000, &[("layers.2.wq", db(50.0)), ("layers.10.wq", non_finite)]);
    let saturated = HealthRecord { saturated: 0.002, step: 2000, ..db(-5.0) };
    worst.health.get_mut("layers.2.wq").unwrap().insert("weight".into(), saturated);
    let records = [
        health(10, &[("layers.2.wq", db(40.0)), ("layers.10.wq", flushed), ("norm", HealthRecord::default())]),
        worst,
        Record { step: 3000, health: [("none".to_string(), Default::default())].into(), ..Default::default() },
    ];
    let svg = fixture.plot(&[fixture.run("run", &records)]);
    for text in ["FP8 health: run", "SQNR (dB)", "sampled step", "10", "2,000"] {
        assert!(svg.texts().contains(&text), "{text}: {:?}", svg.texts());
    }
    assert!(!svg.has("none") && !svg.has("Training loss"), "{:?}", svg.texts());
    let position = |text: &str| svg.texts().iter().position(|other| *other == text).unwrap();
    let (names, marks) = (["norm", "layers.10.wq", "layers.2.wq"].map(position), ["F N", "S"].map(position));
    assert!(names.is_sorted() && marks.is_sorted(), "from below: {names:?} {marks:?}");
    // Both ends of the fixed scale.
    assert_eq!((svg.count("rect", "#440154"), svg.count("rect", "#FEE825")), (1, 1));
    assert_eq!(svg.count("rect", "#9E9E9E"), 1, "all zero");
}

#[test]
fn many_layers_and_samples_share_cells() {
    let fixture = Fixture::new();
    let names: Vec<_> = (0..801).map(|i| format!("layers.{i}")).collect();
    let at = |sqnr| names.iter().map(|name| (name.as_str(), db(sqnr))).collect::<Vec<_>>();
    let records = (1..=250).map(|step| health(step, &at(if step == 43 { 5.0 } else { 35.0 })));
    let svg = fixture.plot(&[fixture.run("run", &records.collect::<Vec<_>>())]);
    let title = "FP8 health: run, the worst of 3 layers a row, the worst of 3 samples a column";
    assert!(svg.has(title), "{:?}", svg.texts());
    assert_eq!(svg.count("rect", "#440154"), 267, "a column");
}

/// Each error leaves the file of an earlier plot. A row has runs, with names or not, whether only
/// differences and health are asked for, the picture, and the error's text.
#[test]
fn what_cannot_be_drawn_is_an_error() {
    let fixture = Fixture::new();
    fixture.plot(&[fixture.run("good", &steps([2.0, 1.0]))]);
    fixture.run("none", &[run("fp8")]);
    let before = fs::read(fixture.path("plot.svg")).unwrap();
    fs::create_dir(fixture.path("empty")).unwrap();
    fs::create_dir(fixture.path("folder.svg")).unwrap();
    fs::write(fixture.path("other.jsonl"), "{}\nno line\n").unwrap();
    for (runs, is_empty, out, text) in table::<(Vec<String>, bool, String, String)>("refusals/plots") {
        let source = |run: &String| match run.split_once('=') {
            Some((name, path)) => PlotSource { name: Some(name.into()), path: fixture.path(path) },
            None => PlotSource { name: None, path: fixture.path(run) },
        };
        let runs: Vec<_> = runs.iter().map(source).collect();
        let panels: &[_] = if is_empty { &[PlotPanel::Difference, PlotPanel::Health] } else { &[] };
        let error = format!("{:#}", plot(&runs, panels, &fixture.path(&out)).unwrap_err());
        let text = text.replace("{}", &format!("{}/", fixture.0.path().display()));
        assert!(error.contains(&text), "{error}\nlacks {text}");
    }
    let empty = PlotSource::parse(OsStr::new("=x")).unwrap_err().to_string();
    assert_eq!(empty, "`=x`: the name before `=` is empty");
    assert_eq!(fs::read(fixture.path("plot.svg")).unwrap(), before);
    let mut left = fs::read_dir(fixture.0.path()).unwrap();
    assert!(left.all(|entry| !entry.unwrap().file_name().to_string_lossy().contains("partial")));
}

#[test]
fn the_command_takes_names_and_prints_the_file() {
    let fixture = Fixture::new();
    let run = fixture.run("run", &steps([2.0, 1.0]));
    let out = fixture.path("out.svg");
    let run = format!("first run={}", run.path.display());
    let command = PlotArgs::try_parse_from(["plot", "--panels", "losses,lr", "--output", out.to_str().unwrap(), &run]);
    let mut printed = vec![];
    command.unwrap().run(&mut printed).unwrap();
    assert_eq!(String::from_utf8(printed).unwrap(), format!("plotted: {}\n", out.display()));
    assert!(Svg::read(&out).has("first run"));
    assert!(PlotArgs::try_parse_from(["plot"]).is_err(), "no run");
}
