//! Plots of runs: what an SVG shows of the recorded metrics, and runs with little or nothing to
//! show.
#![allow(missing_docs)]

mod health;
mod support;

use std::ffi::OsStr;
use std::fs;

use support::{BLUE, Fixture, GREEN, Svg, VERMILION, db, health, held_out, run, step, steps};
use train::metrics::{HealthRecord, METRICS_FILE, MetricsError, Record, TrainRecord};
use train::plot::{PlotError, PlotPanel, PlotSource, plot};

#[test]
fn runs_are_drawn_together() {
    let fixture = Fixture::new();
    let mut first = vec![run("bf16"), held_out(0, 9.0)];
    first.extend(steps((1..=40).map(|i| 3.0 - f64::from(i) * 0.01)));
    first.extend([held_out(20, 2.75), held_out(40, 2.875)]);
    let mut second = vec![run("fp8")];
    second.extend(steps((1..=30).map(|i| 3.1 - f64::from(i) * 0.01)));
    let named = PlotSource { name: Some("<FP8>".into()), ..fixture.run("second", &second) };
    let svg = fixture.plot(&[fixture.run("first", &first), named]);
    for text in ["first", "&lt;FP8&gt;", "bf16 on cpu", "fp8 on cpu", "held-out: last 2.8750, best 2.7500 (step 20)"] {
        assert!(svg.has(text), "{text}");
    }
    for text in ["Training loss", "loss (nats per token)", "Throughput", "tokens/s", "Gradient norm", "Learning rate"] {
        assert!(svg.has(text), "{text}");
    }
    assert!(!svg.has("moving average") && svg.has("no held-out loss") && svg.has("optimizer step"));
    assert!(!svg.has("FP8 health"));
    // One line in the legend, one in each of four panels with few points, and one of held-out
    // losses. The difference belongs to the second run.
    let lines = svg.lines(BLUE);
    let of = |width, len| lines.iter().filter(|line| line.1 == width && line.2.len() == len).count();
    assert_eq!((of(5, 2), of(3, 40), of(2, 3)), (1, 4, 1), "{lines:?}");
    assert!(svg.lines(VERMILION).iter().any(|line| line.1 == 3 && line.2.len() == 30));
    // One in the legend, and one per held-out loss.
    assert_eq!(svg.count("circle", BLUE), 4);
    // The 9.0 before the first step is at the upper end.
    assert!(svg.has("1 value beyond the axis"), "{:?}", svg.texts());
}

#[test]
fn differences_are_of_the_steps_that_both_have() {
    let fixture = Fixture::new();
    let mut first = steps(vec![3.0; 40]);
    first.push(held_out(40, 2.0));
    let mut second: Vec<_> = (1..=60).step_by(2).map(|i| step(i, if i < 20 { 3.25 } else { 2.75 })).collect();
    second.extend([held_out(40, 2.25), held_out(60, 1.0)]);
    let svg = fixture.plot(&[fixture.run("f32", &first), fixture.run("fp8", &second), fixture.run("same", &first)]);
    assert!(svg.has("Training loss less that of f32"));
    // The curve has twenty points: ten above the middle, and ten equally far below it.
    let line = svg.lines(VERMILION).into_iter().find(|line| line.1 == 3 && line.2.len() == 20).unwrap().2;
    assert!(line[..10].iter().all(|point| point.1 == line[0].1) && line[10..].iter().all(|p| p.1 == line[10].1));
    // Its curves: the loss, the difference, ..
    let same = svg.lines(GREEN).into_iter().filter(|line| line.1 == 3).nth(1).unwrap().2[0].1;
    assert!(line[0].1 < same && line[10].1 > same && line[0].1 + line[10].1 - 2 * same <= 1, "{line:?} {same}");
    assert!(!fixture.plot(&[fixture.run("alone", &first)]).has("less that of"));
    assert!(!fixture.plot(&[fixture.run("a", &[step(1, 2.0)]), fixture.run("b", &[step(2, 2.0)])]).has("less that of"));
}

#[test]
fn only_what_was_asked_for_is_drawn() {
    let fixture = Fixture::new();
    let run = fixture.run("run", &steps([2.0; 20]));
    let out = fixture.path("some.svg");
    plot(std::slice::from_ref(&run), &[PlotPanel::Lr, PlotPanel::Losses], &out).unwrap();
    let svg = Svg::read(&out);
    assert!(
        svg.has("Training loss") && svg.has("Learning rate") && !svg.has("Throughput") && !svg.has("Gradient norm")
    );
    let none = plot(&[run], &[PlotPanel::Difference, PlotPanel::Health], &out).unwrap_err();
    assert!(matches!(&none, PlotError::NoPanels { kinds } if kinds.len() == 2));
    assert!(none.to_string().contains("none of these runs has what difference, health would show"), "{none}");
}

#[test]
fn the_first_losses_do_not_squash_the_others() {
    let fixture = Fixture::new();
    let loss = |i: i32| if i < 10 { 11.0 } else { 2.0 + f64::from(i % 2) * 0.2 };
    let svg = fixture.plot(&[fixture.run("run", &steps((0..400).map(loss)))]);
    let faint = svg.lines(BLUE).into_iter().find(|line| line.0 == 0.3).unwrap().2;
    let (low, high) = (faint[300].1.max(faint[301].1), faint[300].1.min(faint[301].1));
    // The panel has 440 units.
    assert!(low - high > 170, "{low} {high}");
    assert!(faint[..10].iter().all(|point| point.1 < high), "clamped, not lost");
    assert!(svg.has("10 values beyond the axis"));
}

#[test]
fn long_runs_are_thinned_and_keep_their_spikes() {
    let fixture = Fixture::new();
    let spike = 17_123;
    let records = steps((0..50_000).map(|i| if i == spike { 3.0 } else { 2.0 + f64::from(i % 3) * 0.25 }));
    let svg = fixture.plot(&[fixture.run("run", &records)]);
    let faint = svg.lines(BLUE).into_iter().find(|line| line.0 == 0.3).unwrap().2;
    assert!((1000..=2000).contains(&faint.len()), "{}", faint.len());
    let highest = faint.iter().min_by_key(|point| point.1).unwrap();
    let second = faint.iter().filter(|point| *point != highest).map(|point| point.1).min().unwrap();
    assert!(second - highest.1 > 40, "{second} {highest:?}");
    let share = f64::from(highest.0 - faint[0].0) / f64::from(faint[faint.len() - 1].0 - faint[0].0);
    assert!((share - f64::from(spike) / 5e4).abs() < 0.002, "{share}");
    assert!(svg.has("smallest and largest of each of at most 999 bins"));
}

#[test]
fn losses_that_are_not_finite_are_marked() {
    let fixture = Fixture::new();
    let loss = |i: i32| if (20..25).contains(&i) { f64::NAN } else { 2.5 };
    let svg = fixture.plot(&[fixture.run("run", &steps((0..100).map(loss)))]);
    let lines = svg.lines(BLUE);
    let faint: Vec<_> = lines.iter().filter(|line| line.0 == 0.3).map(|line| line.2.len()).collect();
    assert_eq!(faint[..2], [20, 75]);
    // Two strokes for each x. Only marks that do not hide each other are drawn: 5 steps are 76
    // units.
    assert_eq!(lines.iter().filter(|line| line.1 == 3 && line.2.len() == 2).count(), 6);
}

#[test]
fn a_run_that_diverged_says_so() {
    let fixture = Fixture::new();
    let mut records = steps([3.0, 2.5]);
    // The loss was still finite.
    records.push(Record { diverged: Some("grad_norm = NaN".into()), ..step(3, 2.4) });
    let svg = fixture.plot(&[fixture.run("run", &records)]);
    assert!(svg.has("diverged at step 3") && !svg.has("no held-out loss"));
    let lines = svg.lines(BLUE);
    assert_eq!(lines.iter().find(|line| line.0 == 0.9).unwrap().2.len(), 2, "{lines:?}");
    // The two strokes of an x.
    assert_eq!(lines.iter().filter(|line| line.0 == 1.0 && line.1 == 3 && line.2.len() == 2).count(), 2, "{lines:?}");
}

#[test]
fn strange_runs_are_drawn() {
    let fixture = Fixture::new();
    let mut huge = steps([1e300, -1e300, 1e29, 0.0, f64::NAN]);
    huge.push(step(usize::MAX, 2.0));
    let nothing = |step| Record { step, train: Some(TrainRecord::default()), ..Default::default() };
    let alone = [vec![step(usize::MAX, 2.0)], vec![step(0, 0.0)], steps([f64::NAN; 9]), vec![held_out(7, 3.0)], huge];
    let others = [
        steps([2.0; 50]),
        vec![nothing(1), nothing(2)],
        vec![health(3, &[("layer", db(f64::INFINITY))])],
        vec![health(3, &[("layer", HealthRecord::default())])],
        vec![step(1, 2.0), health(1, &[])],
        vec![health(4, &[("layer", db(1e300))]), health(5, &[("layer", db(-1e300))])],
    ];
    let runs: Vec<_> = alone.into_iter().chain(others).enumerate().collect();
    let mut sources: Vec<_> = runs.iter().map(|(i, records)| fixture.run(&format!("run{i}"), records)).collect();
    for source in &sources {
        fixture.plot(std::slice::from_ref(source));
    }
    sources.push(fixture.run("without", &[run("fp8")]));
    let svg = fixture.plot(&sources);
    assert!((0..runs.len()).all(|i| svg.has(&format!("run{i}"))) && svg.has("without"));
}

#[test]
fn long_names_are_cut_in_the_middle() {
    let fixture = Fixture::new();
    let name = format!("begins{}ends", "-and-goes-on".repeat(15));
    let svg = fixture.plot(&[fixture.run(&name, &steps([2.0, 1.0]))]);
    let text = svg.texts().into_iter().find(|text| text.starts_with("begins")).unwrap();
    assert!(text.ends_with("ends") && text.contains('…') && text.chars().count() < 50, "{text}");
}

#[test]
fn names_are_taken_from_paths() {
    let fixture = Fixture::new();
    let records = steps([2.0, 1.0]);
    let runs = [fixture.run("a/x", &records), fixture.run("b/x", &records), fixture.run("lr=3", &records)];
    let svg = fixture.plot(&runs);
    assert!(["a/x", "b/x", "lr=3"].iter().all(|name| svg.texts().contains(name)));

    let file = fixture.path("a/x").join("other.jsonl");
    fs::copy(fixture.path("a/x").join(METRICS_FILE), &file).unwrap();
    let svg = fixture.plot(&[PlotSource { name: None, path: file }]);
    assert!(svg.texts().contains(&"other"));

    let parse = |text: &str| PlotSource::parse(OsStr::new(text));
    let existing = fixture.path("lr=3");
    assert_eq!(PlotSource::parse(existing.as_os_str()).unwrap(), PlotSource { name: None, path: existing });
    assert_eq!(parse("a b=c=d").unwrap(), PlotSource { name: Some("a b".into()), path: "c=d".into() });
    assert!(matches!(parse("=x"), Err(PlotError::EmptyName { argument }) if argument == "=x"));
}

#[test]
fn a_step_that_was_made_twice_is_drawn_once() {
    let fixture = Fixture::new();
    let mut records = steps([3.0, 3.0, 3.0]);
    records.extend([step(2, 2.0), step(3, 1.0), held_out(3, 4.0), held_out(3, 1.5)]);
    let svg = fixture.plot(&[fixture.run("run", &records)]);
    assert!(svg.has("held-out: last 1.5000, best 1.5000 (step 3)"));
    let drawn = svg.lines(BLUE).into_iter().find(|line| line.1 == 3).unwrap().2;
    assert!(drawn.len() == 3 && drawn[0].1 < drawn[1].1 && drawn[1].1 < drawn[2].1, "{drawn:?}");
}

#[test]
fn what_cannot_be_drawn_is_told() {
    let fixture = Fixture::new();
    let good = fixture.run("good", &steps([2.0, 1.0]));
    let source = |name: Option<&str>, path: &str| PlotSource { name: name.map(Into::into), path: fixture.path(path) };
    fixture.plot(std::slice::from_ref(&good));
    let before = fs::read(fixture.path("plot.svg")).unwrap();

    let missing = fixture.try_plot(&[good.clone(), source(None, "missing")]);
    assert!(matches!(missing, Err(PlotError::NotFound { path }) if path == fixture.path("missing")));
    fs::create_dir(fixture.path("empty")).unwrap();
    let empty = fixture.try_plot(&[source(None, "empty")]).err().unwrap();
    assert!(matches!(&empty, PlotError::NoMetrics { folder } if *folder == fixture.path("empty")));
    assert!(empty.to_string().contains("holds no metrics.jsonl: give the folder of a run"), "{empty}");

    let none = fixture.run("none", &[run("fp8")]);
    let none = fixture.try_plot(&[none]);
    assert!(matches!(none, Err(PlotError::NoSteps { paths }) if paths == [fixture.path("none").join(METRICS_FILE)]));
    fs::write(fixture.path("other.jsonl"), "{}\nno line\n").unwrap();
    let line = fixture.try_plot(&[source(None, "other.jsonl")]);
    assert!(matches!(line, Err(PlotError::Metrics(MetricsError::Line { line: 2, .. }))));

    let twins = [source(Some("n"), "good"), PlotSource { name: Some("n".into()), ..fixture.run("b", &steps([1.0])) }];
    let twins = fixture.try_plot(&twins);
    assert!(matches!(twins, Err(PlotError::EqualNames { name, .. }) if name == "n"));
    assert!(matches!(fixture.try_plot(&[good.clone(), good.clone()]), Err(PlotError::EqualNames { .. })));

    for name in ["plot.png", "plot"] {
        let error = plot(std::slice::from_ref(&good), &[], &fixture.path(name)).unwrap_err();
        assert!(matches!(&error, PlotError::Extension { path } if *path == fixture.path(name)));
        assert!(error.to_string().contains("pictures are written as .svg"), "{error}");
    }
    fs::create_dir(fixture.path("folder.svg")).unwrap();
    let folder = plot(std::slice::from_ref(&good), &[], &fixture.path("folder.svg"));
    assert!(matches!(folder, Err(PlotError::Write { path, .. }) if path == fixture.path("folder.svg")));

    assert_eq!(fs::read(fixture.path("plot.svg")).unwrap(), before, "what was there is still there");
    let left = fs::read_dir(fixture.0.path()).unwrap();
    assert!(left.into_iter().all(|entry| !entry.unwrap().file_name().to_string_lossy().contains("partial")));
}
