//! The cache: reused, rebuilt after a change or damage, and never half built.

use crate::*;

fn open(files: &Files, progress: &mut dyn FnMut(trainer::Progress)) -> anyhow::Result<Dataset> {
    let validation = Validation::Fraction(0.1);
    Dataset::open(&files.sources(), validation, &Tokenizer::bytes(), None, &files.cache(), progress)
}

fn is_cached(files: &Files) -> bool {
    files.all().was_cached()
}

/// Cache folder with the tokens.
fn entry(files: &Files) -> PathBuf {
    let folders = fs::read_dir(files.cache()).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<_> = folders.filter(|path| path.join("tokens.bin").exists()).collect();
    assert_eq!(folders.len(), 1);
    folders.remove(0)
}

#[test]
fn tokens_are_found_again() {
    let files = Files::new([("a.txt", "one"), ("b.jsonl", "{\"text\": \"two\"}")]);
    let opened = || {
        let mut progress = vec![];
        let dataset = open(&files, &mut |done| progress.push(done)).unwrap();
        (dataset.was_cached(), progress, dataset.size())
    };
    let (was_cached, progress, size) = opened();
    assert!(!was_cached);
    assert_eq!(progress.last(), Some(&trainer::Progress { bytes: 18, total_bytes: 18 }));
    assert_eq!(opened(), (true, vec![], size));
}

#[test]
fn whatever_decides_makes_another() {
    let files = Files::new([("a.jsonl", "{\"text\": \"some text\", \"body\": \"other text\"}")]);
    let open = |source: DataSource, fraction, tokenizer: &Tokenizer| {
        let [first, second] =
            [(); 2].map(|()| files.open_with(std::slice::from_ref(&source), fraction, tokenizer, None).unwrap());
        assert!(second.was_cached());
        first.was_cached()
    };
    let (source, bytes) = (files.source("a.jsonl"), Tokenizer::bytes());
    assert!(!open(source.clone(), 0.0, &bytes));
    assert!(!open(source.clone(), 0.0, &folder_with_tokenizer()));
    assert!(!open(DataSource { field: "body".into(), ..source.clone() }, 0.0, &bytes));
    // These do not matter here: the validation part is another list of the same documents.
    assert!(open(source.clone(), 0.1, &bytes));
    let source = DataSource { max_bytes: Some(1000), extension: Some("x".into()), weight: Some(2.0), ..source };
    assert!(open(source, 0.0, &bytes));
}

fn set_time(files: &Files, name: &str, time: SystemTime) {
    File::options().append(true).open(files.path(name)).unwrap().set_modified(time).unwrap();
}

/// Files with the sizes and times of their last scan are not read. A file with another time is read,
/// and found to be unchanged.
#[test]
fn a_changed_file_is_tokenized_again() {
    let files = Files::new([("a", "one"), ("b", "")]);
    assert!(!is_cached(&files));
    files.write("b", "two");
    assert!(!is_cached(&files));
    // A file just written may be written again within the clock's resolution.
    let modified = fs::metadata(files.path("b")).unwrap().modified().unwrap();
    files.write("b", "six");
    set_time(&files, "b", modified);
    assert_eq!(stream(&files.all()).0, documents(["one", "six"]));
    fs::remove_file(files.path("b")).unwrap();
    assert!(is_cached(&files));

    let seconds = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    set_time(&files, "a", seconds(1_000_000));
    assert!(is_cached(&files));
    files.write("a", "two");
    set_time(&files, "a", seconds(1_000_000));
    assert!(is_cached(&files));
    assert_eq!(stream(&files.all()).0, documents(["one"]));
    set_time(&files, "a", seconds(2_000_000));
    assert!(!is_cached(&files));
    assert_eq!(stream(&files.all()).0, documents(["two"]));
    set_time(&files, "a", seconds(3_000_000));
    assert!(is_cached(&files));
}

#[cfg(unix)]
#[test]
fn what_is_broken_is_made_again() {
    let files = Files::new([("a", "some text"), ("b", "and more text")]);
    let expected = stream(&files.all());
    let pipe = |path: PathBuf| {
        fs::remove_file(&path).unwrap();
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    };
    let breaks: [&dyn Fn(PathBuf); 8] = [
        &|folder| flip(folder.join("tokens.bin"), 2),
        &|folder| flip(folder.join("tokens.bin"), 1030),
        &|folder| File::options().write(true).open(folder.join("tokens.bin")).unwrap().set_len(10).unwrap(),
        &|folder| fs::remove_file(folder.join("tokens.bin")).unwrap(),
        &|folder| fs::remove_file(folder.join("manifest.json")).unwrap(),
        &|folder| fs::write(folder.join("manifest.json"), "{\"content\": ").unwrap(),
        &|folder| pipe(folder.join("manifest.json")),
        &|folder| pipe(folder.join("tokens.bin")),
    ];
    for break_it in breaks {
        break_it(entry(&files));
        assert!(!is_cached(&files));
        assert!(is_cached(&files));
        assert_eq!(stream(&files.all()), expected);
    }
    // A broken scan memory loses nothing.
    for path in fs::read_dir(files.cache()).unwrap().map(|entry| entry.unwrap().path()) {
        if path.to_string_lossy().ends_with(".files.json") {
            fs::write(path, "broken").unwrap();
        }
    }
    assert!(is_cached(&files));
}

#[test]
fn an_error_leaves_nothing_behind() {
    let files = Files::new([("a.jsonl", "{\"text\": \"good\"}\nbad\n")]);
    assert!(files.error().contains("a.jsonl:2: "));
    let left: Vec<_> = fs::read_dir(files.cache()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(left.iter().all(|path| path.is_file()), "{left:?}");
    files.write("a.jsonl", "{\"text\": \"good\"}\n");
    assert_eq!(stream(&files.all()).0, documents(["good"]));
}

#[test]
fn a_file_that_is_written_to_while_it_is_read() {
    let files = Files::new([("a.jsonl", "{\"text\": \"some\"}\n".repeat(9000))]);
    let mut write = |_| files.write("a.jsonl", "{\"text\": \"other\"}\n".repeat(9000));
    let error = open(&files, &mut write).unwrap_err();
    assert!(
        message(&error).ends_with("a.jsonl changed while it was read: start again when nothing writes to it"),
        "{error}"
    );
    assert!(!is_cached(&files));
}

#[test]
fn a_cache_that_cannot_be_written() {
    let files = Files::new([("a", "text")]);
    fs::write(files.cache(), "a file").unwrap();
    let error = message(&files.open(&files.sources(), 0.0).unwrap_err());
    let expected =
        format!("cannot write {}: free space there, or choose another cache folder: ", files.cache().display());
    assert!(error.starts_with(&expected), "{error}");
}

const FOLDER: &str = "TRAIN_TEST_FOLDER";
const DIES: &str = "TRAIN_TEST_DIES";

/// Starts this test again in a separate process, which opens the files in `folder`.
fn process(test: &str, files: &Files, dies: bool) -> std::process::Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).env(FOLDER, files.dir.path());
    command.envs(dies.then_some((DIES, ""))).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
}

/// Task of the separate process: prints the number of tokens, or dies after some are written.
fn open_in_folder(folder: PathBuf) {
    let sources = [DataSource::new([folder.join("files")])];
    let mut die = |progress: trainer::Progress| {
        if env::var_os(DIES).is_some() && progress.bytes > 0 {
            std::process::abort();
        }
    };
    let (validation, cache) = (Validation::Fraction(0.1), folder.join("cache"));
    let dataset = Dataset::open(&sources, validation, &Tokenizer::bytes(), None, &cache, &mut die).unwrap();
    println!("cached {} tokens {}.", dataset.was_cached(), dataset.size().train_tokens);
}

/// One process tokenizes, and the others wait.
#[test]
fn two_processes_at_once() {
    if let Some(folder) = env::var_os(FOLDER) {
        return open_in_folder(folder.into());
    }
    let files = Files::new((0..200).map(|i| (format!("{i}"), "text ".repeat(2000))));
    let children = [(); 3].map(|()| process("cache::two_processes_at_once", &files, false));
    let texts = children.map(|child| String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap());
    assert!(texts.iter().all(|text| text.contains("tokens 1800180.")), "{texts:?}");
    assert_eq!(texts.iter().filter(|text| text.contains("cached false")).count(), 1);
}

/// The remains of a process are listed, and can be removed.
#[test]
fn a_process_that_dies_leaves_no_cache() {
    if let Some(folder) = env::var_os(FOLDER) {
        return open_in_folder(folder.into());
    }
    let files = Files::new((0..3).map(|i| (format!("{i}"), "text ".repeat(1000))));
    let mut child = process("cache::a_process_that_dies_leaves_no_cache", &files, true);
    assert!(!child.wait().unwrap().success());
    let left = KeptTokens::list(&files.cache()).unwrap();
    assert!(left.len() == 1 && !left[0].is_whole && left[0].bytes > 0, "{left:?}");
    assert_eq!(KeptTokens::prune(&files.cache(), Duration::ZERO).unwrap(), left);
    assert!(!left[0].path.exists());
    assert!(!is_cached(&files) && entry(&files).join("manifest.json").exists());
}

/// Entries being made stay, and so does another program's folder, even with a manifest.
#[test]
fn pruning_leaves_alone_what_is_being_made() {
    let files = Files::new([("a.txt", "text ".repeat(100))]);
    let other = files.cache().join("web/manifest.json");
    fs::create_dir_all(other.parent().unwrap()).unwrap();
    fs::write(&other, "{}").unwrap();
    let mut pruned = 0;
    let mut prune = |_: trainer::Progress| {
        assert_eq!(KeptTokens::prune(&files.cache(), Duration::ZERO).unwrap(), []);
        pruned += 1;
    };
    assert!(!open(&files, &mut prune).unwrap().was_cached());
    assert!(pruned > 0 && other.exists());
    assert!(open(&files, &mut |_| {}).unwrap().was_cached());
}

/// The most recently used entries come first. Recent ones stay, and removed ones are rebuilt.
#[test]
fn tokens_are_listed_and_pruned() {
    let files = Files::new([("a", "one"), ("b", "two")]);
    let open = |name: &str| files.open(&[files.source(name)], 0.0).unwrap().was_cached();
    let of = |kept: Vec<KeptTokens>| kept.into_iter().map(|kept| kept.of).collect::<Vec<_>>();
    let list = || KeptTokens::list(&files.cache()).unwrap();
    let [a, b] = ["a", "b"].map(|name| files.path(name).display().to_string());
    assert!(list().is_empty() && !open("a") && !open("b"));
    let day = Duration::from_secs(24 * 60 * 60);
    for kept in list() {
        let files = fs::read_dir(&kept.path).unwrap().map(|file| file.unwrap().metadata().unwrap().len());
        assert_eq!(kept.bytes, files.sum::<u64>());
        let manifest = File::options().append(true).open(kept.path.join("manifest.json")).unwrap();
        manifest.set_modified(SystemTime::now() - 10 * day).unwrap();
    }
    // Use is recorded.
    assert!(open("a"));
    assert_eq!(of(list()), [a.clone(), b.clone()]);
    let pruned = KeptTokens::prune(&files.cache(), 5 * day).unwrap();
    assert!(!pruned[0].path.exists());
    assert_eq!((of(pruned), of(list())), (vec![b], vec![a]));
    assert!(open("a") && !open("b"));
    assert_eq!(KeptTokens::prune(&files.cache(), Duration::ZERO).unwrap().len(), 2);
    assert!(list().is_empty() && !open("a"));
}
